"""A model that raises, in the stage that a sample names, with text that is no valid UTF-8; or ends its own process by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from gpupool.errors import InvalidInput


class Hostile:
    """Acts on a sample's `in` (the stage) and `do`; text comes from the client as JSON, which can spell what UTF-8 cannot."""

    def preprocess(self, sample: Any) -> Any:
        return self._act(sample, "preprocess")

    def length(self, sample: Any) -> int:
        self._act(sample, "length")
        return 1

    def forward(self, batch: list[Any]) -> list[Any]:
        return [self._act(sample, "forward") for sample in batch]

    def postprocess(self, result: Any) -> Any:
        return self._act(result, "postprocess")

    def _act(self, sample: Any, stage: str) -> Any:
        if not isinstance(sample, dict) or sample.get("in") != stage:
            return sample
        match sample["do"]:
            case "text":
                raise ValueError(json.loads(sample["text"]))
            case "field":
                raise InvalidInput("bad", field=json.loads(sample["text"]))
            case "value":
                return {"y": json.loads(sample["text"])}
            case "key":
                return {json.loads(sample["text"]): {1, 2}}
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
        return sample
