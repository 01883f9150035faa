#!/usr/bin/env python3
"""Derives every constant and polynomial coefficient of core/scalar_math.h.

    fit_math.py            print the table
    fit_math.py --write    replace the block between the markers in core/scalar_math.h
    fit_math.py --check    exit 1 if that block is not what this script derives

Each polynomial is the minimax solution on its interval for the stated weight (so that the error
bounded is the *relative* error of the function's value), found by the Remez exchange in 50 decimal
digits and then rounded to the target format. Printed beside each: log2 of the largest weighted error
before and after rounding the coefficients (before any rounding of the evaluation). Needs mpmath only.
"""

import pathlib
import sys

from mpmath import mp, mpf

mp.dps = 50
GRID_POINTS = 900
HEADER = pathlib.Path(__file__).resolve().parent.parent / "core" / "scalar_math.h"
BEGIN = "// BEGIN of the table written by scripts/fit_math.py"
END = "// END of the table written by scripts/fit_math.py"


def round_to_bits(value, bits):
    """The nearest number of `bits` significant bits (no exponent limit is met here)."""
    with mp.workprec(bits):
        return +mpf(value)


def truncate_to_bits(value, bits):
    """The number of `bits` significant bits towards zero."""
    mantissa, exponent = mp.frexp(mpf(value))
    return mp.ldexp(mp.floor(mp.ldexp(mantissa, bits)), int(exponent) - bits)


def hex_literal(value, single):
    """`value`, which fits the format, as a C++ hexadecimal literal."""
    text = float(value).hex()
    mantissa, exponent = text.split("p")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}p{exponent}{'f' if single else ''}"


def chebyshev_grid(low, high):
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mp.cos(mp.pi * (i + mpf(1) / 2) / GRID_POINTS)
            for i in range(GRID_POINTS)]


def evaluate(coefficients, x):
    total = mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


FIXED_BITS = 200  # fixed point: far faster than mpf, and finer than any target here needs


def to_fixed(value):
    return int(mp.nint(mp.ldexp(value, FIXED_BITS)))


def evaluate_on_grid(coefficients, fixed_grid):
    """The polynomial at each grid point."""
    fixed = [to_fixed(c) for c in reversed(coefficients)]
    results = []
    for x in fixed_grid:
        total = 0
        for c in fixed:
            total = (total * x >> FIXED_BITS) + c
        results.append(mp.ldexp(mpf(total), -FIXED_BITS))
    return results


def alternating_extrema(errors, wanted):
    """Indices of the largest error in each run of one sign, cut to `wanted` from the weaker end."""
    picks = []
    for i, e in enumerate(errors):
        if picks and (errors[picks[-1]] > 0) == (e > 0):
            if abs(e) > abs(errors[picks[-1]]):
                picks[-1] = i
        else:
            picks.append(i)
    while len(picks) > wanted:
        picks.pop(0 if abs(errors[picks[0]]) < abs(errors[picks[-1]]) else -1)
    return picks


def minimax(target, weight, low, high, terms):
    """c[0..terms) minimising max |weight(x) * (target(x) - sum c[i] x^i)| over [low, high]."""
    grid = chebyshev_grid(mpf(low), mpf(high))
    values = [target(x) for x in grid]
    weights = [weight(x) for x in grid]
    fixed_grid = [to_fixed(x) for x in grid]
    reference = [round((i + 0.5) * GRID_POINTS / (terms + 1)) for i in range(terms + 1)]
    for _ in range(60):
        matrix, right = mp.matrix(terms + 1, terms + 1), mp.matrix(terms + 1, 1)
        for row, g in enumerate(reference):
            for column in range(terms):
                matrix[row, column] = grid[g] ** column
            matrix[row, terms] = (-1) ** row / weights[g]
            right[row] = values[g]
        solution = mp.lu_solve(matrix, right)
        coefficients = [solution[i] for i in range(terms)]
        fitted = evaluate_on_grid(coefficients, fixed_grid)
        errors = [w * (v - f) for f, v, w in zip(fitted, values, weights)]
        level, largest = abs(solution[terms]), max(abs(e) for e in errors)
        if largest <= level * (1 + mpf(10) ** -6):
            return coefficients, largest, (grid, values, weights)
        picks = alternating_extrema(errors, terms + 1)
        if len(picks) != terms + 1:
            raise RuntimeError("the error does not alternate often enough")
        reference = picks
    raise RuntimeError("the Remez exchange did not settle")


def polynomial(name, text, target, weight, low, high, terms, single):
    """Lines of the header for one polynomial; the coefficients ascend in the power of x."""
    exact, before, (grid, values, weights) = minimax(target, weight, low, high, terms)
    rounded = [round_to_bits(c, 24 if single else 53) for c in exact]
    after = max(abs(w * (v - evaluate(rounded, x))) for x, v, w in zip(grid, values, weights))
    literals = [hex_literal(c, single) for c in rounded]
    lines = [f"// {text}",
             f"// x in [{mp.nstr(mpf(low), 5)}, {mp.nstr(mpf(high), 5)}], largest error "
             f"2^{mp.nstr(mp.log(before, 2), 4)}, coefficients rounded 2^{mp.nstr(mp.log(after, 2), 4)}.",
             f"#define RT_{name} \\"]
    per_line = 5 if single else 4
    for i in range(0, len(literals), per_line):
        last = i + per_line >= len(literals)
        lines.append("  " + ", ".join(literals[i:i + per_line]) + ("" if last else ", \\"))
    return lines


def constant(name, value, single, text=""):
    kind = "float" if single else "double"
    comment = f"  // {text}" if text else ""
    return f"constexpr {kind} {name} = {hex_literal(value, single)};{comment}"


def constants():
    ln2, half_pi = mp.log(2), mp.pi / 2
    # n * ln2_hi is exact: |n| < 2^8 (FP32), < 2^11 (FP64).
    hi32, hi64 = truncate_to_bits(ln2, 16), truncate_to_bits(ln2, 42)
    parts, rest = [], half_pi
    for _ in range(3):
        parts.append(round_to_bits(rest, 53))
        rest -= parts[-1]
    lines = [
        constant("kLog2E32", round_to_bits(1 / ln2, 24), True),
        constant("kLn2Hi32", hi32, True, "16 bits: times an exponent it is exact"),
        constant("kLn2Lo32", round_to_bits(ln2 - hi32, 24), True),
        constant("kLog2E64", round_to_bits(1 / ln2, 53), False),
        constant("kLn2Hi64", hi64, False, "42 bits: times an exponent it is exact"),
        constant("kLn2Lo64", round_to_bits(ln2 - hi64, 53), False),
        constant("kTwoOverPi64", round_to_bits(1 / half_pi, 53), False),
        constant("kTwoPi64", round_to_bits(4 * half_pi, 53), False),
    ]
    lines += [constant(f"kHalfPi{i + 1}", p, False, "pi/2 is the sum of the three" if i == 0 else "")
              for i, p in enumerate(parts)]
    sqrt_half = mp.sqrt(mpf(1) / 2)
    bits32 = int(mp.nint(mp.ldexp(sqrt_half, 24))) - (1 << 23) + (126 << 23)
    bits64 = int(mp.nint(mp.ldexp(sqrt_half, 53))) - (1 << 52) + (1022 << 52)
    lines.append(f"constexpr int32_t kSqrtHalfBits32 = 0x{bits32:08x};")
    lines.append(f"constexpr int64_t kSqrtHalfBits64 = 0x{bits64:016x};")
    return lines


def two_over_pi_words():
    """64 zero bits, then 19 * 64 bits of 2/pi after the binary point."""
    with mp.workprec(1400):
        bits = int(mp.floor(mp.ldexp(2 / mp.pi, 19 * 64)))
    words = [0] + [(bits >> (64 * (18 - i))) & (2**64 - 1) for i in range(19)]
    lines = ["// 64 zero bits, then 1216 bits of 2/pi.", "#define RT_TWO_OVER_PI_WORDS \\"]
    for i in range(0, 20, 4):
        row = ", ".join(f"0x{w:016x}u" for w in words[i:i + 4])
        lines.append("  " + row + (", \\" if i + 4 < 20 else ""))
    return lines


def with_digits(digits, f):
    """f evaluated in more digits, for formulas that cancel."""
    def wrapped(x):
        with mp.workdps(digits):
            return f(x)
    return wrapped


def polynomials():
    half_ln2 = mp.log(2) / 2 * (1 + mpf(2) ** -12)
    low_f, high_f = mp.sqrt(mpf(1) / 2) - 1, mp.sqrt(2) - 1
    s_max = high_f / (2 + high_f)
    pi_4 = mp.pi / 4 * (1 + mpf(2) ** -12)
    log_tail = with_digits(90, lambda f: (mp.log(1 + f) - f + f * f / 2) / f**3)
    log_s_tail = with_digits(90, lambda z: (2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 2) / z)
    tanh_tail = with_digits(90, lambda z: (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z)
    tanh_weight = lambda z: z * mp.sqrt(z) / mp.tanh(mp.sqrt(z))
    tiny = mpf(10) ** -8
    exp_tail = with_digits(90, lambda r: (mp.exp(r) - 1 - r) / r**2)
    sin_tail = with_digits(90, lambda z: (mp.sin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z)
    cos_tail = with_digits(90, lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2)
    exp_weight = lambda r: r * r * mp.exp(-r)
    exp_text = "q of exp(x) = 1 + x + x^2 q(x)"
    tanh_text = "p of tanh(t) = t + t^3 p(x), x = t^2"
    return [
        polynomial("EXP32", exp_text, exp_tail, exp_weight, -half_ln2, half_ln2, 5, True),
        polynomial("LOG32", "p of log(1 + x) = x - x^2/2 + x^3 p(x)", log_tail,
                   lambda f: f**3 / mp.log(1 + f), low_f, high_f, 9, True),
        polynomial("TANH32", tanh_text, tanh_tail, tanh_weight, tiny, mpf("0.6875") ** 2, 6, True),
        polynomial("EXP64", exp_text, exp_tail, exp_weight, -half_ln2, half_ln2, 11, False),
        polynomial("LOG64", "p of log((1+s)/(1-s)) = 2 s + s x p(x), x = s^2", log_s_tail,
                   lambda z: z / 2, tiny, s_max**2, 8, False),
        polynomial("TANH64", tanh_text, tanh_tail, tanh_weight, tiny, mpf("0.25") ** 2, 8, False),
        polynomial("SIN64", "p of sin(t) = t + t^3 p(x), x = t^2", sin_tail,
                   lambda z: z * mp.sqrt(z) / mp.sin(mp.sqrt(z)), tiny, pi_4**2, 7, False),
        polynomial("COS64", "p of cos(t) = 1 - x/2 + x^2 p(x), x = t^2", cos_tail,
                   lambda z: z * z / mp.cos(mp.sqrt(z)), tiny, pi_4**2, 6, False),
    ]


def table():
    lines = constants()
    for block in polynomials():
        lines += [""] + block
    return lines + [""] + two_over_pi_words()


def main():
    lines = table()
    if len(sys.argv) == 1:
        print("\n".join(lines))
        return 0
    text = HEADER.read_text()
    before, rest = text.split(BEGIN + "\n")
    old, after = rest.split(END)
    new = "\n".join(lines) + "\n"
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(before + BEGIN + "\n" + new + END + after)
        return 0
    if sys.argv[1:] == ["--check"]:
        print("same" if old == new else "core/scalar_math.h differs from the derivation")
        return 0 if old == new else 1
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
