"""What thresholds, one-bit optimizers, levels, cuts and partial sums send, and what they cost in quality and CPU time.

Sections, by ``--sections``: ``data_parallel``, ``one_bit`` and ``levels`` train on 4 gloo ranks and count their bytes;
``model_parallel`` trains in one process, where a cut does the same to values as between ranks, and counts the bytes of
an exchange between 2 ranks; ``codecs`` does so with what TorchRec's all-to-all can send; ``des`` counts the bytes of
one forward and backward on 4 ranks; ``cost`` measures CPU time; ``resumes`` saves on 4 ranks and goes on on 2, 3, 4 and
8. The model is a small DLRM on generated clicks with a known truth, or on MovieLens 100k, whose file lies beside the
repository; seeds change initial weights and batches. The sizes that take minutes are too small for most goals of
quality: docs/communication.md names those of its figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import harness
from wire_codecs import codecs
from wire_cost import cost
from wire_cuts import model_parallel
from wire_levels import levels
from wire_model import CLICKS, ML_100K
from wire_one_bit import PUBLISHED, one_bit
from wire_resumes import resumes
from wire_sums import des
from wire_thresholds import data_parallel

SECTIONS: dict[str, Callable[[harness.Report, argparse.Namespace], None]] = {
    "data_parallel": data_parallel,
    "one_bit": one_bit,
    "levels": levels,
    "model_parallel": model_parallel,
    "codecs": codecs,
    "des": des,
    "cost": cost,
    "resumes": resumes,
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--clicks", nargs="+", choices=CLICKS, default=list(CLICKS))
    parser.add_argument("--optimizers", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="1 seed, 20 steps: whether it works, not what it finds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 20
    report = harness.Report("Bytes on the wire: thresholds, one-bit optimizers, levels, cuts, partial sums")
    report.start()
    if "ml-100k" in options.clicks and not ML_100K.is_file():
        report.note(f"left out ml-100k: no {ML_100K}")
        options.clicks.remove("ml-100k")
    for name in options.sections:
        SECTIONS[name](report, options)
    report.finish(options.json)


if __name__ == "__main__":
    main()
