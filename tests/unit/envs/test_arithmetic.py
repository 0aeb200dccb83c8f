import pytest

from posttrain.config import ArithmeticConfig
from posttrain.envs.arithmetic import ArithmeticSpec, Problem, grade
from posttrain.errors import ConfigError, DataError


def spec(seed: int = 0, **settings) -> ArithmeticSpec:
    return ArithmeticSpec(ArithmeticConfig(**{"num_eval": 20, **settings}), seed)


def problems(tasks) -> list[Problem]:
    hidden = [tasks[i].hidden.reveal() for i in range(len(tasks))]
    return [Problem(h["a"], h["op"], h["b"]) for h in hidden]


@pytest.mark.parametrize("operations", [("+",), ("*",), ("-",), ("+", "-", "*")])
def test_held_out_problems_and_their_mirrors_never_train(operations) -> None:
    """k11: split first, by problem."""
    it = spec(operations=operations, min_operand=-3, max_operand=9)
    train, held_out = problems(it.train_tasks()), problems(it.eval_tasks())
    assert {p.key for p in train}.isdisjoint(p.key for p in held_out)
    assert len({p.key for p in held_out}) == len(held_out) == 20
    assert len(set(train)) == len(train)
    mirrored = {Problem(p.b, p.op, p.a) for p in held_out if p.op != "-"}
    everything = 13 * 13 * len(operations)
    assert len(set(train) | set(held_out) | mirrored) == everything


def test_the_held_out_problems_are_the_same_for_every_seed() -> None:
    first, second = spec(seed=0, num_train=50), spec(seed=1, num_train=50)
    assert problems(first.eval_tasks()) == problems(second.eval_tasks())
    assert problems(first.train_tasks()) != problems(second.train_tasks())


def test_a_subset_of_training_problems_holds_no_held_out_one() -> None:
    it = spec(max_operand=9, num_train=30)
    assert len(it.train_tasks()) == 30
    keys = {p.key for p in problems(it.train_tasks())}
    assert keys.isdisjoint(p.key for p in problems(it.eval_tasks()))


def test_a_range_of_billions_is_indexed_not_enumerated() -> None:
    it = spec(operations=("+", "*"), max_operand=10**6)
    tasks = it.train_tasks()
    assert len(tasks) == 2 * (10**6 + 1) ** 2 - 40  # no held-out problem here is its own mirror
    last = tasks[len(tasks) - 1].hidden.reveal()
    assert last["answer"] in (last["a"] + last["b"], last["a"] * last["b"])


def test_a_range_that_is_too_small_says_the_numbers() -> None:
    with pytest.raises(DataError, match=r"0\.\.9 holds 55 different .* num_eval 200 .* 208"):
        spec(max_operand=9, num_eval=200)
    with pytest.raises(DataError, match=r"num_train is 90, but \d+ problems remain"):
        spec(max_operand=9, num_train=90)


@pytest.mark.parametrize(
    ("operation", "low", "high"),
    [("+", 0, 5 * 10**18), ("-", -5 * 10**18, 5 * 10**18), ("*", -4 * 10**9, 3 * 10**9)],
)
def test_a_range_whose_answers_could_not_be_read_is_refused(operation, low, high) -> None:
    with pytest.raises(ConfigError, match=r"up to 19 digits"):
        spec(operations=(operation,), min_operand=low, max_operand=high)
    it = spec(operations=(operation,), min_operand=low // 2, max_operand=high // 2)
    widest = max((low // 2, high // 2), key=abs)
    task = it.task(Problem(widest, operation, widest))
    assert grade(task, str(task.hidden.reveal()["answer"])).value == 1.0


def test_a_prompt_that_hides_an_operand_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lacks \{b\}"):
        spec(prompt="{a} plus?")
    with pytest.raises(ConfigError, match=r"lacks \{op\}"):
        spec(prompt="{a} {b}", operations=("+", "-"))
    with pytest.raises(ConfigError, match=r"\{x\}"):
        spec(prompt="{a}{x}{b}")


def test_system_and_template_make_the_prompt() -> None:
    it = spec(system="Only the number.", prompt="What is {a}{op}{b}?")
    task = it.task(Problem(3, "+", 4))
    assert [(m.role, m.plain_text()) for m in task.prompt] == [
        ("system", "Only the number."),
        ("user", "What is 3+4?"),
    ]


@pytest.mark.parametrize(
    ("text", "value", "parsed"),
    [
        ("12", 1, True),
        (" 12.\n", 1, True),
        ("5 + 7 = 12", 1, True),
        ("5+7=12", 1, True),
        ("5+7 =  12\n", 1, True),
        ("13", 0, True),
        ("-12", 0, True),
        ("5 + 7 = 13", 0, True),
        ("7 + 5 = 12", 0, False),
        ("6 + 6 = 12", 0, False),
        ("5 + 7 = 12 = 12", 0, False),
        ("5 + 7 = 12 or 13", 0, False),
        ("5 + 7 = 12.", 0, False),
        ("12 13", 0, False),
        ("The answer is 12", 0, False),
        ("5 + 7 = ?", 0, False),
        ("1 2", 0, False),
        ("12.0", 0, False),
        ("1e1", 0, False),
        pytest.param("\uff11\uff12", 0, False, id="digits that int() reads"),
        ("1_2", 0, False),
        ("0x0c", 0, False),
        ("", 0, False),
        pytest.param("9" * 10**6, 0, False, id="a million digits"),
        pytest.param("5 + 7 = " + "9" * 10**6, 0, False, id="an equation with a million"),
    ],
)
def test_only_the_answer_or_the_tasks_own_equation_counts(text, value, parsed) -> None:
    verdict = grade(spec().task(Problem(5, "+", 7)), text)
    assert (verdict.value, verdict.parsed, verdict.correct) == (value, parsed, bool(value))


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(-3, "-", -5), "2"),
        (Problem(-3, "-", -5), "-3 - -5 = 2"),
        (Problem(3, "-", 5), "-2"),
        (Problem(4, "*", 6), "4 * 6 = 24"),
        (Problem(3, "-", 3), "0"),
    ],
)
def test_signs_and_operators_are_read(problem: Problem, text: str) -> None:
    assert grade(spec().task(problem), text).value == 1.0


def test_an_operator_is_no_pattern() -> None:
    """`*` and `+` mean themselves: 44446=24 must not pass as 4*6=24."""
    assert not grade(spec().task(Problem(4, "*", 6)), "44446=24").parsed
    assert not grade(spec().task(Problem(4, "+", 6)), "4446=10").parsed
