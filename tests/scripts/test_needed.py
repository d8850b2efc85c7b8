"""A script whose Python lacks a package names it in one line."""

import pytest
from helpers import ROOT, fork


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("embed.py", "torch"),
        ("fill_mask.py", "torch"),
        ("finetune.py", "transformers"),
        ("gpu_check.py", "omegaconf"),
        ("minimal_pairs.py", "accelerate"),
        ("try_held_out.py", "data_pipeline"),
    ],
)
def test_a_package_that_is_missing_is_named(script: str, name: str) -> None:
    path = str(ROOT / "scripts" / script)
    hide = f"sys.modules[{name!r}] = None; sys.path.insert(0, {str(ROOT / 'scripts')!r})"
    done = fork(["-c", f"import runpy, sys; {hide}; runpy.run_path({path!r})"])
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"lacks {name}; install them with pip, or run source" in line
