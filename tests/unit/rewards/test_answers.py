"""Which part of a completion is the final answer."""

from __future__ import annotations

import pytest

from posttrain.rewards.answers import NoAnswer, Region, find_answer


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        ("42", "42", "whole"),
        ("  x = 5 ", "x = 5", "whole"),
        ("42 apples", "42 apples", "whole"),
        ("Tuesday", "Tuesday", "whole"),
        ("12 or 13", "12 or 13", "whole"),
        ("I think it is 42.", "42", "number"),
        (r"so it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}", "boxed"),
        (r"\boxed{42}, hence \boxed{42}", "42", "boxed"),
        (r"$\boxed{1331}$ and $\boxed{1728}$", "1331, 1728", "boxed"),
        (r"The answer is 5. \boxed{6}", "6", "boxed"),
        ("The answer is 42.", "42", "phrase"),
        ("The answer is 3. No: the answer is 4.", "4", "phrase"),
        ("The answer is 42 because 6*7=42.", "42", "phrase"),
        ("The answer is $x = 5$, since $2x = 10$.", "x = 5", "phrase"),
        ("The final answer is $\\frac12$. I hope it is correct.", "\\frac12", "phrase"),
        ("**Final Answer**\n\n73\n", "73", "phrase"),
        ("Final answer:\n$$\n\\frac12\n$$", "\\frac12", "phrase"),
        ("He has 3 and 4 of them.\n#### 7", "7", "phrase"),
        ("<think>is it 41?</think>The answer is 42", "42", "phrase"),
        ("it was 41</think>\n\\boxed{42}", "42", "boxed"),
        ("<think>41</think><answer>42</answer>", "42", "whole"),
    ],
)
def test_there_is_one_final_region_and_a_rule_that_found_it(
    text: str, answer: str, rule: str
) -> None:
    assert find_answer(text) == Region(answer, rule)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (r"\boxed{}", r"empty \boxed"),
        (r"\boxed{1} or even \boxed{42}", "several boxed"),
        (r"the rest is cut \boxed{4", "never closes"),
        (r"<think>surely \boxed{42}</think>", "empty"),
        (r"<think>surely \boxed{42}", "thinking never ended"),
        ("42 <THINK> or not", "thinking never ended"),
        ("<answer>41</answer><answer>42</answer>", "different <answer> tags"),
        ("I get 5 and then 7.", "2 different numbers"),
        ("1\n2\n3\n42", "4 different numbers"),
        ("The answer is", "nothing follows"),
    ],
)
def test_no_single_region_means_no_answer_and_the_reason(text: str, reason: str) -> None:
    found = find_answer(text)
    assert isinstance(found, NoAnswer)
    assert reason in found.reason
