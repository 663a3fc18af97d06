"""`python tests/fuzz`: whole programs at random, on grids and dense."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

import torch
from campaign import SECONDS, Campaign, concise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a program may take")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest program that fails")
    parser.add_argument("--without", default="", help="features to take out of the programs, with commas between")
    parser.add_argument("--only", default="", choices=["stacks", "languages"], help="programs of one kind")
    parser.add_argument("--json", type=Path, help="add the record of this campaign to a file")
    options = parser.parse_args()
    campaign = Campaign(
        options.ranks,
        shrink=options.shrink,
        seconds=options.seconds,
        without=[feature for feature in options.without.split(",") if feature],
        only=options.only,
        report=lambda text: print(text, flush=True),
    )
    began = time.monotonic()
    campaign.run(range(options.seed, options.seed + options.programs), began + 60 * options.minutes)
    seconds = time.monotonic() - began
    print(
        f"{campaign.num_run} programs on {options.ranks} ranks, {campaign.num_compared} results compared, "
        f"{len(campaign.failures)} failures, {seconds:.0f} s"
    )
    if options.json:
        record = {
            "ranks": options.ranks,
            "seeds": [options.seed, options.seed + campaign.num_run],
            "programs": campaign.num_run,
            "only": options.only or "all",
            "results_compared": campaign.num_compared,
            "seconds": round(seconds),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "failures": [
                {"seed": failure.seed, "what": failure.what, "smallest": failure.smallest and concise(failure.smallest)}
                for failure in campaign.failures
            ],
            "features": dict(sorted(campaign.features.items())),
        }
        told = json.loads(options.json.read_text()) if options.json.exists() else {"campaigns": []}
        told["campaigns"].append(record)
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
