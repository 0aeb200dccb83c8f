import pytest

from posttrain.data.template import PromptTemplate
from posttrain.errors import ConfigError


def test_braces_in_values_and_doubled_braces_stay_text() -> None:
    template = PromptTemplate("{q}: \\boxed{{{n}}}", owner="env.template")
    assert template.render({"q": "{x}", "n": 4}) == "{x}: \\boxed{4}"


@pytest.mark.parametrize("text", ["{q.__class__}", "{q[0]}", "{q:>9}", "{q!r}", "{}", "{0.a}"])
def test_a_template_cannot_reach_into_objects(text: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.template .*plain name"):
        PromptTemplate(text, owner="env.template")


@pytest.mark.parametrize("text", ["{q", "q}", "{q{x}}"])
def test_an_unbalanced_brace_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.prompt.*\{\{"):
        PromptTemplate(text, owner="env.prompt")


def test_an_unknown_placeholder_names_the_nearest() -> None:
    template = PromptTemplate("{qestion}", owner="env.template")
    with pytest.raises(ConfigError, match="did you mean question"):
        template.require_known(["question", "answer"])
