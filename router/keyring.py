"""The clients' public keys: one file each in a folder, whose coming and going is noticed without a restart.

The folder is listed twice a second, by a thread, as a network's file system can take its time. Nothing but a file that changed is read,
so a look at some keys costs microseconds; at the most, 1000, some milliseconds of another core. The time stamp of the folder alone
would be cheaper, and would miss a key replaced in place. A folder that is gone authorises nobody; one that cannot be read for want of
descriptors, or of a disk that answers, changes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gpupool.keys import NAME, PASSING, PUBLIC_SUFFIX, KeyFileError, read_public

LOOK_S: Final = 0.5
MAX_KEYS: Final = 1000
#: Of all files in the folder.
_MAX_ENTRIES: Final = 10_000

_Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Keys:
    """What a folder says: client names by key, and what is wrong, by the name of the file ("": the folder)."""

    names: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Keyring:
    """A folder of key files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[_Stamp, str]] = {}  # the good ones; a bad one may be half written, and is read again
        self._last = Keys()

    def look(self) -> Keys:
        """Say what is there now. Equal to the last answer unless something has changed."""
        try:
            self._last = self._keys(self._listed())
        except (FileNotFoundError, NotADirectoryError) as e:
            self._last = Keys(problems={"": f"{self._folder}: {e.strerror}"})
        except OSError as e:
            self._last = replace(self._last, problems={"": f"{self._folder}: {e.strerror}; the keys stay as they were"})
        return self._last

    def _listed(self) -> dict[str, _Stamp]:
        """Return the key files, by name, with what tells a file from its successor."""
        stamps: dict[str, _Stamp] = {}
        with os.scandir(self._folder) as entries:
            for count, entry in enumerate(entries):
                if count >= _MAX_ENTRIES:
                    raise OSError(None, f"more than {_MAX_ENTRIES} files")
                if entry.name.endswith(PUBLIC_SUFFIX) and not entry.name.startswith("."):
                    try:
                        about = entry.stat()
                    except FileNotFoundError:  # gone meanwhile, or a link to nowhere
                        continue
                    except OSError as e:
                        if e.errno in PASSING:
                            raise
                        stamps[entry.name] = (0, 0, 0, 0)  # read_public will say what is wrong with it
                        continue
                    stamps[entry.name] = about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_size
        return dict(sorted(stamps.items()))

    def _keys(self, stamps: dict[str, _Stamp]) -> Keys:
        read: dict[str, tuple[_Stamp, str]] = {}
        names: dict[str, str] = {}
        problems: dict[str, str] = {}
        for file, stamp in stamps.items():
            name = file.removesuffix(PUBLIC_SUFFIX)
            if not NAME.fullmatch(name):
                problems[file] = "its name is not 1 to 64 letters, digits, dots, dashes and underscores"
                continue
            if len(names) + len(problems) >= MAX_KEYS:
                problems[""] = f"{self._folder}: more than {MAX_KEYS} keys; those from {file} on are not used"
                break
            there = self._read.get(file)
            try:
                key = there[1] if there is not None and there[0] == stamp else read_public(self._folder / file)
            except KeyFileError as e:
                problems[file] = str(e)
                continue
            read[file] = stamp, key
            if key in names:
                problems[file] = f"holds the same key as {names[key]}{PUBLIC_SUFFIX}"
            else:
                names[key] = name
        self._read = read
        return Keys(names, problems)


def watch(keyring: Keyring, known: Keys, tell: Callable[[Keys], object]) -> Callable[[], None]:
    """Look at a folder for as long as the process lives, and tell what has changed since `known`, from a thread; returns what ends it."""
    ending = threading.Event()

    def run() -> None:
        last = known
        while not ending.wait(LOOK_S):
            if (keys := keyring.look()) != last:
                last = keys
                tell(keys)

    threading.Thread(target=run, name="keyring", daemon=True).start()
    return ending.set
