"""What counts as the same answer. Pairs are (gold, answer), in the policy's and data's notation."""

from __future__ import annotations

import pytest

from posttrain.rewards.math_compare import GoldError, control, grade

# huggingface/Math-Verify#14 (case c05): each was accepted once.
WRONGLY_ACCEPTED_ONCE = [
    ("1/2004!", "1/2006!"),
    ("1/2^{99}", "1/2^{98}"),
    ("n=2,3,4", "n=1,2,3"),
    ("D=(0,1)", "D=(0,1.5)"),
    ("19, 46, and 82", "21, 36, and 82"),
    ("(2^{2005}+1)/(3*2^{2006})", "1/(3*2^{2006})"),
    ("1-1/e", "1+1/e"),
    (r"\pm 2021", "2021"),
    ("12:00", "1:00"),
    ("1,2,...,n", "1,3,5,...,2n-1"),
    ("1:2:3:...", "1:4:9:..."),
]
DIFFERENT = [
    ("1331 and 1728", "1728"),
    ("12", "12 or 13"),
    ("12", "1, 12, 13"),
    ("5", "5,5"),
    ("5", "-5"),
    ("42", "42!"),
    ("0", "1/2004!"),
    ("7", r"\sqrt{50}"),
    ("x+1", "x+2"),
    ("x=5", "y=5"),
    ("2x+4y-3=0", "0"),
    ("2x+4y-3=0", "2x+4y-4=0"),
    ("x<5", "x>5"),
    (r"x \le 3", "x<3"),
    ("5", "x<5"),
    ("[0,1]", "(0,1)"),
    (r"\{1,2\}", r"\{1,3\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("1+2i", "1-2i"),
    ("cat", "act"),
    ("no", "on"),
    ("A", "B"),
    ("5 cm", "5 m"),
    ("50%", "0.05"),
]
SAME = [
    ("73", "**73**"),  # c01
    (r"$\text{13}$", "$13$"),  # c03
    ("2x+4y-3=0", "y=-1/2 x+3/4"),  # c06
    ("-34x-45y+20z-100=0", "34x+45y-20z+100=0"),
    ("1331 and 1728", "1728, 1331"),  # c07
    (r"$\sqrt{1/n}$", r"$\frac{1}{\sqrt{n}}$"),  # c08
    ("(1,9/2)", "(1,4.5)"),  # c09
    ("(x+2)/7", "x/7+2/7"),
    ("tan^2(y)+1", "sec^2(y)"),
    (r"7.41\%", r"7.41\%"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("0.5", r"50\%"),
    ("1,234", "1234"),
    ("1500", r"1.5 \times 10^3"),
    (r"0.\overline{3}", "1/3"),
    ("7/2", r"3\frac{1}{2}"),
    ("2^10", "1024"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt2}"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sum_{i=1}^{3} i", "6"),
    ("1+2i", "2i+1"),
    ("42", "x = 42"),
    ("x=3", "3=x"),
    (r"x=\pm 3", "x=3 or x=-3"),
    ("f(x)=x+1", "f(x)=1+x"),
    ("[0,1)", r"x \in [0, 1)"),
    ("(1,2)", "1<x<2"),
    ("x<5", "5>x"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2, \infty) \cup (-\infty, 1)"),
    (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{bmatrix}1\\2.0\end{bmatrix}"),
    ("42", "42 apples"),
    (r"5\text{ cm}", "5"),
    (r"\$5", "5 dollars"),
    (r"90^\circ", "90"),
    ("Tuesday", "tuesday"),
    ("B", "(B)"),
    ("-3", "\u22123"),
]


@pytest.mark.parametrize(("gold", "answer"), WRONGLY_ACCEPTED_ONCE + DIFFERENT)
def test_a_different_answer_is_wrong(gold: str, answer: str) -> None:
    """Cases c05 and c07, and their kind."""
    result = grade(rf"\boxed{{{answer}}}", gold)
    assert not result["correct"] and result["parsed"], result
    assert control(gold)


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_another_writing_of_the_answer_is_right(gold: str, answer: str) -> None:
    """Cases c01, c03, c06, c07, c08, c09, c11, and their kind."""
    result = grade(rf"\boxed{{{answer}}}", gold)
    assert result["correct"], result
    assert control(gold)


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("1/12", "0.0833333333333333", True),
        ("100/3", "33.33", True),
        ("33.33", "100/3", True),
        ("100/3", "33.3", False),  # three significant digits
        ("100/3", "33.34", False),  # not the rounding
        ("100/3", "33", False),  # an integer claims to be exact
        ("2/3", "0.6667", True),
        ("2/3", "0.6666", False),  # cut off, not rounded
        (r"\pi", "3.142", True),
        (r"\pi", "3.14", False),
        ("-2/3", "-0.6667", True),
        ("1/4", "0.25", True),  # exact, however few digits
        ("12.5", "12.54", False),
        ("3.14159", "3.142", True),
        (r"66.67\%", "2/3", True),
        ("33333", "33333.3", False),
    ],
)
def test_decimals_follow_the_rounding_rule(gold: str, answer: str, correct: bool) -> None:
    """Case c09: at least four significant digits, and rounded, not cut."""
    assert grade(rf"\boxed{{{answer}}}", gold)["correct"] is correct


@pytest.mark.parametrize(
    ("prompt", "gold", "answer"),
    [
        ("What is 2 + 3?", "5", "2+3"),
        ("What is 2 + 3?", "5", "3 + 2"),
        ("What is $84/2$?", "42", r"\frac{84}{2}"),
        ("What is $2^{10}$?", "1024", "2^10"),
        ("What is 5!?", "120", "5!"),
        ("Simplify 2/4", "1/2", "2/4"),
        (r"Expand $(x-1)(x+1)$.", "x^2-1", "(x-1)(x+1)"),
    ],
)
def test_an_echo_of_the_question_is_no_answer(prompt: str, gold: str, answer: str) -> None:
    result = grade(rf"\boxed{{{answer}}}", gold, prompt)
    assert not result["correct"], result


def test_choosing_an_expression_of_the_question_is_an_answer() -> None:
    prompt = "Which is larger, 1/2 or 1/3? Or x+1?"
    assert grade(r"\boxed{1/2}", r"\frac{1}{2}", prompt)["correct"]
    assert grade(r"\boxed{x+1}", "x+1", prompt)["correct"]


@pytest.mark.parametrize("answer", ["(" * 1900, "(" * 900 + "42" + ")" * 900, "[42", "42]"])
def test_brackets_that_cannot_mean_anything_never_reach_the_parser(answer: str) -> None:
    result = grade(f"The answer is {answer}", "42")
    assert not result["correct"] and "brackets" in result["evidence"]


def test_a_gold_may_carry_its_solution() -> None:
    assert grade("18", "16 - 3 - 4 = 9, 9 * 2 = 18\n#### 18")["correct"]
    assert grade("18", r"We find $\boxed{18}$.")["correct"]


@pytest.mark.parametrize("gold", ["****", r"\frac{", "+"])
def test_a_gold_that_cannot_be_read_is_an_error_not_a_wrong_answer(gold: str) -> None:
    with pytest.raises(GoldError):
        grade("5", gold)
