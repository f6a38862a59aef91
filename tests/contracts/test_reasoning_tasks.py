"""What the generated datasets put into a row is what the rewards need, for tasks of every kind."""

from optional_packages import needs_reasoning_gym

from grpo_cli.data.reasoning import questions
from rewards.reasoning import correct, score

TASKS = (
    *("basic_arithmetic", "base_conversion", "binary_alternation", "caesar_cipher", "calendar_arithmetic", "chain_sum"),
    *("color_cube_rotation", "course_schedule", "dice", "family_relationships", "fraction_simplification", "gcd"),
    *("group_anagrams", "gsm_symbolic", "knights_knaves", "leg_counting", "letter_jumble", "list_functions", "maze"),
    *("mini_sudoku", "needle_haystack", "number_sorting", "simple_equations", "spiral_matrix", "syllogism"),
)


@needs_reasoning_gym
def test_a_tasks_own_answers_are_right_and_others_are_not() -> None:
    rows = [row for task in TASKS for row in questions(tasks={task: None}, size=4)]
    entries = [row["entry"] for row in rows]
    answers = [f"It must be this: <answer>{row['answer']}</answer>" for row in rows]
    assert correct(completions=answers, entry=entries, allow_unconfined=True) == [1.0] * len(rows)
    wrong = ["<answer>I do not know</answer>"] * len(rows)
    assert correct(completions=wrong, entry=entries, allow_unconfined=True) == [0.0] * len(rows)
    assert all(each is not None and each < 1 for each in score(completions=wrong, entry=entries, allow_unconfined=True))
