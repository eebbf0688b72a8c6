"""Every case from public bug reports has a test under its number or a reason why it has none."""

from support import cases


def test_every_case_has_a_test_or_a_reason():
    assert cases.missing(cases.find_tests()) == []


def test_every_named_case_exists():
    tests = cases.find_tests()
    others = {case for case in tests if case[0] in cases.GROUPS} - set(cases.CASES)
    assert others == set(), "test names speak of cases that are not in tests/support/cases.py"
    assert set(cases.NOTES) | set(cases.PENDING) <= set(cases.CASES)


def test_table_is_current():
    written = cases.TABLE.read_text("utf-8")
    assert written == cases.render(cases.find_tests()), "run `make cases`"


def test_finds_a_case_without_a_test():
    tests = {case: ["x"] for case in cases.CASES if case != "H-03"}
    assert cases.missing(tests, notes={}, pending={}) == ["H-03"]
    assert cases.missing(tests, notes={"H-03": "the part with ZeRO-2 comes later"}, pending={}) == ["H-03"]
    assert cases.missing(tests, notes={"H-03": "needs a GPU"}, pending={}) == []
    assert cases.missing(tests, notes={}, pending={"H-03": "being written"}) == []


def test_finds_tests_by_name(tmp_path):
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_losses.py").write_text(
        "def test_h_03_temperature(): ...\n"
        "class TestMore:\n    def test_h_03(self): ...\n"
        "def test_h_031(): ...\ndef test_kl(): ...\ndef helper_h_04(): ...\n"
    )
    (tmp_path / "unit" / "helpers.py").write_text("def test_h_05(): ...\n")
    found = cases.find_tests(tmp_path)
    assert found == {"H-03": ["unit/test_losses.py::test_h_03_temperature", "unit/test_losses.py::test_h_03"]}
