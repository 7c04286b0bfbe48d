"""What every line of a pool's log has to look like, as pydantic models; docs/logs.schema.json is made of them.

pydantic because it is there already: a validator of JSON schemas would be one more package, for tests alone.
`python -m support.log_lines` writes the schema again.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA: Final = Path(__file__).parents[2] / "docs" / "logs.schema.json"

Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]


class Line(BaseModel):
    """Any line."""

    model_config = ConfigDict(extra="allow", strict=True)

    time: Annotated[float, Field(gt=0, description="Seconds since 1970.")]
    timestamp: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00$", description="ISO 8601, UTC.")]
    level: Literal["debug", "info", "warning", "error"]
    event: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
    component: Literal["supervisor", "router", "worker", "probe"]
    pid: Annotated[int, Field(gt=0)]
    worker: Count | None = None
    incarnation: Count | None = None
    device: str | None = None
    model: str | None = None
    traceback: str | None = None
    cut_from_bytes: Annotated[int, Field(ge=4096)] | None = None


class RequestLine(Line):
    """The line of a request, which has these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    level: Literal["info"]
    event: Literal["request"]
    component: Literal["router"]
    request_id: str | None
    client: str
    user: str | None = None
    code: str
    overflow: Literal[True] | None = None
    trace_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    sends: Count | None = None
    attempts: Count
    batch_size: Count
    input_bytes: Count
    output_bytes: Count
    ticket: Count | None = None
    length: Count | None = None
    message: str | None = None
    pending_ms: Milliseconds | None = None
    queue_ms: Milliseconds | None = None
    preprocess_ms: Milliseconds | None = None
    forward_ms: Milliseconds | None = None
    postprocess_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None


def check(text: str) -> Line:
    """Validate one line as it was written.

    Raises:
        pydantic.ValidationError: saying what is wrong with it.
        AssertionError: it is too long, or not one line.
    """
    assert len(text.encode()) < 4096, text[:200]
    values = json.loads(text)
    kind = RequestLine if isinstance(values, dict) and values.get("event") == "request" else Line
    line = kind.model_validate(values)
    assert abs(datetime.fromisoformat(line.timestamp).timestamp() - line.time) < 1e-3, text
    return line


def schema() -> dict[str, Any]:
    """The JSON schema."""
    adapter: TypeAdapter[Any] = TypeAdapter(RequestLine | Line)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of gpupool's log",
        "$defs": adapter.json_schema()["$defs"],
        "if": {"properties": {"event": {"const": "request"}}},
        "then": {"$ref": "#/$defs/RequestLine"},
        "else": {"$ref": "#/$defs/Line"},
    }


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
