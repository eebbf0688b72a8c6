from support import source_checks as checks


def test_package_keeps_to_the_sizes():
    assert checks.size_problems(checks.package_modules()) == []


def test_finds_a_long_file():
    module = checks.parse("silverspoon_kd.long", "x = 1\n" * 401)
    assert checks.size_problems([module]) == ["silverspoon_kd.long has 401 lines; at most 400"]
    assert checks.size_problems([checks.parse("silverspoon_kd.fits", "x = 1\n" * 400)]) == []


def test_finds_a_long_function_also_inside_a_class():
    body = "        x = 1\n"
    long = checks.parse("silverspoon_kd.m", f"class A:\n    def f(self):\n{body * 60}")
    fits = checks.parse("silverspoon_kd.m", f"class A:\n    def f(self):\n{body * 59}")
    assert checks.size_problems([long]) == ["silverspoon_kd.m.f has 61 lines; at most 60"]
    assert checks.size_problems([fits]) == []


def test_counts_public_methods_once_each():
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(15))
    private = "    def _p(self): ...\n    def __call__(self): ...\n    def m0(self, again): ...\n"
    assert checks.size_problems([checks.parse("silverspoon_kd.m", f"class A:\n{methods}{private}")]) == []
    more = checks.parse("silverspoon_kd.m", f"class A:\n{methods}    def one_more(self): ...\n")
    assert checks.size_problems([more]) == ["silverspoon_kd.m.A has 16 public methods; at most 15"]
