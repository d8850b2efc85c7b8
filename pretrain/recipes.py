"""List the recipes and launch files that come with the project, and copy one:
`python -m pretrain configs [NAME [FILE]]`."""

import argparse
from pathlib import Path

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import write_file

PACKAGE = Path(__file__).parent


def find_recipes() -> dict[str, Path]:
    """Map the name of each recipe and launch file, such as `mini` or `accelerate/gpu_8`, to it.

    They lie in `configs/` inside the package where a wheel is installed, and beside it in a clone.
    """
    inside = PACKAGE / "configs"
    folder = inside if inside.is_dir() else PACKAGE.parent / "configs"
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def describe_recipe(path: Path) -> str:
    """Return the first line of a recipe's header, which says what the recipe is."""
    return path.read_text(encoding="utf-8").partition("\n")[0].strip("# .:")


def copy_recipe(name: str, target: Path | None = None, overwrite: bool = False) -> Path:
    """Copy a recipe to `target`, or to the current folder under its own name; returns the copy.

    Raises `UserError` for an unknown name, and for a file that exists, unless `overwrite`.
    """
    recipes = find_recipes()
    recipe = recipes.get(name.removesuffix(".yaml"))
    if recipe is None:
        raise UserError(f"no recipe {name!r}; choose from {', '.join(recipes)}")
    target = target or Path(recipe.name)
    if target.is_dir():
        raise UserError(f"{target} is a folder; give a file name, such as {target / recipe.name}")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists; give another FILE, or replace it with --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, recipe.read_bytes())
    return target


def main(arguments: list[str]) -> None:
    """Run `python -m pretrain configs` with its arguments."""
    parser = argparse.ArgumentParser(prog="python -m pretrain configs", description=__doc__)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="recipe to copy (default: list all)"
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, help="name of the copy (default: NAME.yaml)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    args = parser.parse_args(arguments)
    if args.name:
        print(f"copied {args.name} to {copy_recipe(args.name, args.file, args.overwrite)}")
        return
    recipes = find_recipes()
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:{width}}  {describe_recipe(path)}")
    print("copy one: python -m pretrain configs NAME [FILE]")
