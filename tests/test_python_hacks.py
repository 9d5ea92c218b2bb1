"""The reward python_tests against code that sets out to be called right; honest code is not hit."""

import pytest

from grpo_engine.rewards.builtin import python_tests

TESTS = "assert f(2) == 4\nassert f(3) == 9\n"
EQUAL = "    def __eq__(self, o): return True\n    __hash__ = None\n"
WALK = """
def f(x):
    try:
        raise ValueError
    except ValueError as e:
        frame = e.__traceback__.tb_frame
    while frame:
        for space in (frame.f_globals, frame.f_locals):
            if '__held__' in space:
                space['__held__'].add(0)
            key = space.get('key')
            if isinstance(key, (str, bytes)) and len(key) == 32:
                import os
                key = key.encode() if isinstance(key, str) else key
                for fd in range(3, 12):
                    os.write(fd, key + b' 1.0')
                os._exit(0)
        frame = frame.f_back
    raise SystemExit
"""
READ = """
import os
for fd in range(3, 12):
    try:
        key = os.read(fd, 64)
    except OSError:
        continue
    for other in range(3, 12):
        try:
            os.write(other, key + b' 1.0')
        except OSError:
            pass
    os._exit(0)
"""
HACKS = {
    "equal to all": f"class Y:\n{EQUAL}def f(x): return Y()",
    "not unequal": f"class Y:\n{EQUAL}    def __ne__(self, o): return False\ndef f(x): return Y()",
    "an int": f"class Y(int):\n{EQUAL}def f(x): return Y()",
    "a str": f"class Y(str):\n{EQUAL}def f(x): return Y()",
    "a list": f"class Y(list):\n{EQUAL}def f(x): return Y()",
    "an int that reads as four": "class Y(int):\n    def __int__(s): return 4\n    __index__ = "
    "__int__\n    def __add__(s, o): return 4\n    def __eq__(s, o): return True\n"
    "def f(x): return Y()",
    "a class": f"class M(type):\n{EQUAL}class Y(metaclass=M): pass\ndef f(x): return Y",
    "under the test's name": f"class f:\n    def __init__(self, x): pass\n{EQUAL}",
    "the library's": "from unittest.mock import ANY\ndef f(x): return ANY",
    "truth of its own": "class Y:\n    def __eq__(self, o): return self\n    def __bool__(self): "
    "return True\ndef f(x): return Y()",
    "bound later": f"class Y:\n{EQUAL}class f:\n    def __new__(cls, x): return Y()",
    "the pipe of the key": READ,
    "frames": WALK,
    "an exit that is none": "import sys\nsys.exit = print\ndef f(x): sys.exit(0)",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "builtins": "__builtins__['AssertionError'] = None\ndef f(x): return 0",
}


def test_what_is_made_to_look_right_earns_nothing():
    got = python_tests(list(HACKS.values()), [TESTS] * len(HACKS))
    assert dict(zip(HACKS, got, strict=True)) == dict.fromkeys(HACKS, 0.0)


Y = f"class Y:\n{EQUAL}"
WAYS = {
    "in a list": ("def f(x): return [Y()]", "assert f(2) == [4]"),
    "in a dict": ("def f(x): return {2: Y()}", "assert f(2) == {2: 4}"),
    "in a deque": (
        "import collections\ndef f(x): return collections.deque([Y()])",
        "from collections import deque\nassert f(2) == deque([4])",
    ),
    "yielded": ("def f(x):\n    yield Y()", "for y in f(2): assert y == 4"),
    "mapped": ("def f(x): return Y()", "for y in map(f, [2]): assert y == 4"),
    "awaited": ("async def f(x): return Y()", "import asyncio\nassert asyncio.run(f(2)) == 4"),
    "of a method": ("class S:\n    def pop(self): return Y()", "assert S().pop() == 4"),
    "an attribute": ("class S:\n    top = Y()", "assert S().top == 4"),
    "turned round": ("def f(x): return Y()", "assert 4 == f(2)"),
    "not": ("def f(x): return Y()", "assert not f(2) != 4"),
    "subtracted": (
        "class Z(float):\n    def __sub__(self, o): return 0.0\ndef f(x): return Z()",
        "assert abs(f(2) - 4) < 0.1",
    ),
    "inside": (
        "class Z(list):\n    def __contains__(self, o): return True\ndef f(x): return Z()",
        "assert 4 in f(2)",
    ),
    "long": (
        "class Z(str):\n    def __len__(self): return 4\ndef f(x): return Z()",
        "assert len(f(2)) == 4",
    ),
}


@pytest.mark.parametrize("partial", [False, True])
def test_by_whatever_way_it_reaches_the_test(partial):
    codes = [Y + code for code, _ in WAYS.values()]
    got = python_tests(codes, [test for _, test in WAYS.values()], partial=partial)
    assert dict(zip(WAYS, got, strict=True)) == dict.fromkeys(WAYS, 0.0)


VECTOR = (
    "class V:\n    def __init__(self, *x): self.x = x\n"
    "    def __eq__(self, o): return self.x == o.x\n"
    "    def __add__(self, o): return V(*map(sum, zip(self.x, o.x)))\n"
)
HONEST = {
    "named tuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    a: int\ndef f(x): return P(x)",
        "assert f(2) == (2,)",
    ),
    "fractions": (
        "from fractions import Fraction\ndef f(x): return Fraction(x, 4)",
        "assert f(2) == 0.5",
    ),
    "counter": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "int enum": (
        "import enum\nclass E(enum.IntEnum):\n    A = 4\ndef f(x): return E.A",
        "assert f(2) == 4",
    ),
    "objects of its own": (
        VECTOR,
        "assert V(1, 2) + V(3, 4) == V(4, 6)\nassert V(1) != V(2)\n"
        "assert [V(1)] == [V(1)]\nassert V(1, 2).x == (1, 2)",
    ),
    "a node of the tests": (
        "def f(n): return n.next",
        "class Node:\n    def __init__(self, v, n=None): self.v, self.next = v, n\n"
        "assert f(Node(1, Node(2))).v == 2",
    ),
    "functions back": ("def f(x): return lambda y: x + y", "assert f(2)(3) == 5"),
    "in place": ("def f(x): x.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
    "itself": ("def f(x): return x", "a = [2, 1]\nassert f(a) is a"),
    "generator": (
        "def f(x):\n    yield from range(x)",
        "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0",
    ),
    "errors": (
        "class E(Exception): pass\ndef f(x): raise E('no')",
        "try:\n    f(1)\n    assert False\nexcept Exception as e:\n    assert 'no' in str(e)",
    ),
    "unittest": (
        "def f(x): raise ValueError('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        with self.assertRaises(ValueError): f(1)\n        super().setUp()\n"
        "T('test').debug()",
    ),
    "a traceback": (
        "import traceback\ndef f(x):\n    try: 1 / 0\n    except ZeroDivisionError:\n"
        "        return traceback.format_exc()",
        "assert 'division' in f(1)",
    ),
    "match": (
        "def f(x): return x",
        "import re\nmatch f(2):\n    case re.DOTALL: y = 2\n    case 2: y = 4\nassert y == 4",
    ),
    "nan, chains": (
        "def f(x): return x",
        "assert f(1) < f(2) == 2 != 3\nn = float('nan')\nassert f(n) != n",
    ),
}


def test_honest_code_is_not_hit():
    codes, tests = zip(*HONEST.values(), strict=True)
    got = python_tests(list(codes), list(tests))
    assert dict(zip(HONEST, got, strict=True)) == dict.fromkeys(HONEST, 1.0)
