"""The checks of a GPU lose nothing when they are cut off; their findings are for a machine that has one."""

from pathlib import Path

from records import Results, read


def test_every_record_is_in_the_file_as_soon_as_there_is_one(tmp_path: Path):
    path = tmp_path / "gpu.json"
    results = Results(path)
    seen: list[int] = []

    def fails() -> tuple[bool, str]:
        seen.append(len(read(path)))
        raise ValueError("no")

    results.check("first", lambda: (True, "fine"))
    results.check("second", fails)
    assert seen == [1]
    assert read(path)[1] == {"check": "second", "ok": False, "detail": "ValueError: no"}


def test_only_what_has_the_asked_text_in_its_name_is_checked():
    results = Results(only="int8")
    results.check("sign on the device", lambda: (False, "asked"))
    results.check("int8 on the device", lambda: (True, ""))
    assert [record["check"] for record in results.found] == ["int8 on the device"]
