"""`triptych recipes`."""

from typing import Literal

from triptych.cli.terminal import print_json, write_output
from triptych.errors import UsageError
from triptych.training import (
    find_recipe,
    shipped_recipes,
)


def recipes(
    action: Literal["show"] | None = None,
    name: str | None = None,
    *,
    as_json: bool = False,
) -> None:
    """List the built-in recipes, or show one.

    `triptych train NAME` trains one of them; `triptych new` makes a recipe for a text of your own.

    Options:
        action: show: print a recipe.
        name: The recipe to print.
        as_json: Print the list as JSON.

    Examples:
        triptych recipes
        triptych recipes show demo
    """
    if action is None:
        found = {
            one: _recipe_text(one).partition("\n")[0].removeprefix("# ")
            for one in shipped_recipes()
        }
        if as_json:
            print_json(found)
            return
        width = max(map(len, found))
        write_output(
            "".join(f"{one:<{width}}  {said}\n" for one, said in found.items())
        )
        return
    if name is None or as_json:
        raise UsageError(
            "show takes the name of a recipe and no options: triptych recipes show demo"
        )
    write_output(_recipe_text(name))


def _recipe_text(name: str) -> str:
    return find_recipe(name).read_text(encoding="utf-8")
