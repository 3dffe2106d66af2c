"""The checks of a GPU lose nothing when they are cut off; their findings are for a machine that has one."""

import json
from pathlib import Path

from gpu_records import Results


def test_every_record_is_in_the_file_as_soon_as_there_is_one(tmp_path: Path):
    path = tmp_path / "gpu.json"
    results = Results(path)
    seen: list[int] = []

    def fails() -> tuple[bool, str]:
        seen.append(len(json.loads(path.read_text())))
        raise ValueError("no")

    results.check("first", lambda: (True, "fine"))
    results.check("second", fails)
    assert seen == [1]
    assert json.loads(path.read_text())[1] == {"check": "second", "ok": False, "detail": "ValueError: no"}


def test_only_what_has_the_asked_text_in_its_name_is_checked():
    results = Results(only="int8")
    results.check("sign on the device", lambda: (False, "asked"))
    results.check("int8 on the device", lambda: (True, ""))
    assert [record["check"] for record in results.records] == ["int8 on the device"]
