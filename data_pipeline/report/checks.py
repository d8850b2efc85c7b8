"""Check the figures of the audit against their targets."""

import math

from data_pipeline.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS
from data_pipeline.report.audit import LONG
from data_pipeline.sampling.masking import SPANS


def percent(share: float) -> str:
    """Format a fraction (0 to 1) as a percentage."""
    return f"{100 * share:.2f} %"


def pieces_name(pieces: int) -> str:
    """Name the class of words with so many pieces, as the audit counts them."""
    return {1: "1 piece", LONG: f"{LONG} pieces or more"}.get(pieces, f"{pieces} pieces")


def check_results(result: dict) -> list[dict]:
    """Check the figures of pairs and masks against their targets.

    Returns for each check its name, what was found, what was wanted, and whether it holds. Figures
    that depend on random draws may also be off by three standard errors of their sample.
    """
    settings, coverage, masks = result["settings"], result["coverage"], result["masks"]
    objective, bound = settings["objective"], settings["max_predictions_per_seq"]
    prob, checks = settings["masked_lm_prob"], []
    together = len(SPANS.get(settings["masking"], "1"))  # most words per draw

    def check(name: str, found: str, wanted: str, holds: bool) -> None:
        checks.append({"name": name, "found": found, "wanted": wanted, "holds": bool(holds)})

    def near(name: str, found: float, wanted: float, within: float, n: int) -> None:
        within += 3 * math.sqrt(wanted * (1 - wanted) * together / max(n, 1))
        text = f"{percent(wanted)} ± {100 * within:.2f}"
        check(name, percent(found), text, abs(found - wanted) <= within)

    def none(name: str, found: int) -> None:
        check(name, f"{found:,}", "0", found == 0)

    if "pairs" in result:
        epoch, pairs = result["epoch"], result["pairs"]
        found, half = epoch["random"], epoch["pairs"] // 2
        what = "Random pairs of the epoch" if objective == "nsp" else "Swapped pairs"
        check(what, f"{found:,} of {epoch['pairs']:,}", f"{half:,}", abs(found - half) <= 1)
        if objective == "nsp":
            none("Random B's from A's own document", pairs["random_same_document"])
            none("IsNext B's that do not come after A", pairs["next_elsewhere"])
        limit = min(0.51 + 1.5 / math.sqrt(max(pairs["tested"], 1)), 1)
        for name, text in (("by_lengths", "lengths of A and B"), ("by_total", "total length")):
            told = pairs[name]["balanced"]
            check(
                f"Labels predicted from the {text}",
                percent(told),
                f"≤ {percent(limit)}",
                told <= limit,
            )
    covered = coverage["covered"]
    check("Tokens in a sequence of the epoch", percent(covered), "≥ 99.50 %", covered >= 0.995)
    none("Tokens in more than one sequence", coverage["again"])
    if bound is None:
        near("Masked tokens", masks["masked"], prob, 0.002, masks["words_masked"])
    else:
        found = masks["most_in_a_sequence"]
        check("Most masked tokens in a sequence", f"{found:,}", f"≤ {bound:,}", found <= bound)
    if settings["masking"] != "token":
        none("Words masked in part", masks["partly_masked_words"])
    for row in masks["by_pieces"] if bound is None else []:
        name = f"Masked words of {pieces_name(row['pieces'])}"
        near(name, row["masked"], prob, 0.005, row["words"])
    mask, random = settings["mask_replace_prob"], settings["random_replace_prob"]
    same = random * masks["drawn_same"]  # share of the predicted tokens, counted as kept
    for name, text, wanted in (
        ("mask", "[MASK]", mask),
        ("random", "a random piece", random - same),
        ("kept", "the token itself", max(1 - mask - random, 0) + same),
    ):
        found = masks["replaced"][name]
        near(f"In a masked place: {text}", found, wanted, 0.003, masks["words_masked"])
    none("Special pieces among the random ones", masks["special_pieces"])
    none("Tokens changed but not predicted", masks["changed_unmasked"])
    return checks


def check_held_out(manifest: dict) -> list[dict]:
    """Check that the held-out split is large enough for its losses to be trusted."""
    wanted = {"documents": HELD_OUT_DOCUMENTS, "tokens": HELD_OUT_TOKENS}
    found = {name: manifest["held_out"][name] for name in wanted}
    return [
        {
            "name": f"Held-out {name}",
            "found": f"{found[name]:,}",
            "wanted": f"≥ {wanted[name]:,}",
            "holds": found[name] >= wanted[name],
        }
        for name in wanted
    ]
