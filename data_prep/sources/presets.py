"""Known data sets (`--source NAME`): their paths on the Hub, keys, sizes and licences.

The names, columns and sizes are those of stored pages; no data were downloaded to check them.
README.md lists the unconfirmed ones.
"""

from __future__ import annotations

from dataclasses import dataclass

HUB_PREFIX = "hub:"
TEXT_KEY = "text"
SET_KEY = "meta.redpajama_set_name"  # SlimPajama's


@dataclass(frozen=True)
class Preset:
    """A data set on the Hub.

    Attributes:
        path: its repository and folder.
        licence: recorded in the manifest.
        kind: the layout, hub or slimpajama.
        text_key, set_key: the keys of a document's text and of its set.
        file_bytes: the approximate size of its files, if known.
    """

    path: str
    licence: str
    kind: str = "hub"
    text_key: str = TEXT_KEY
    set_key: str = SET_KEY
    file_bytes: float | None = None


_FINEWEB = f"{HUB_PREFIX}HuggingFaceFW/fineweb-edu/sample"
_AS_SOURCES = "the licences of its sources, see the data set's page"
PRESETS = {
    "fineweb-edu-10bt": Preset(f"{_FINEWEB}/10BT", "ODC-By", set_key="dump", file_bytes=30e9),
    "fineweb-edu-100bt": Preset(f"{_FINEWEB}/100BT", "ODC-By", set_key="dump"),
    "fineweb-edu-350bt": Preset(f"{_FINEWEB}/350BT", "ODC-By", set_key="dump"),
    "dclm": Preset(f"{HUB_PREFIX}mlfoundations/dclm-baseline-1.0", "CC-BY-4.0"),
    "common-pile": Preset(
        f"{HUB_PREFIX}common-pile/comma_v0.1_training_dataset",
        "open licences, which each document names",
        set_key="source",
    ),
    "slimpajama-6b": Preset(
        f"{HUB_PREFIX}DKYoon/SlimPajama-6B", _AS_SOURCES, "slimpajama", file_bytes=14e9
    ),
    "slimpajama-627b": Preset(
        f"{HUB_PREFIX}gmongaras/SlimPajama-627B_Reupload",
        _AS_SOURCES,
        "slimpajama",
        file_bytes=1.5e12,
    ),
    "slimpajama-627b-dc": Preset(
        f"{HUB_PREFIX}MBZUAI-LLM/SlimPajama-627B-DC", _AS_SOURCES, "slimpajama", file_bytes=883e9
    ),
}
