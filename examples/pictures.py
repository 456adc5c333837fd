# SPDX-License-Identifier: Apache-2.0
"""A small model with random weights learns to compare two pictures, or to count in a video, in minutes on a CPU.

    python examples/pictures.py two_images [--run-dir runs/pictures/two_images] [--seed 0]

Draws pictures, warms the model up on right answers, trains it with the recipe of that name, and shows accuracy on
held-out rows before and after RL, as `whet quickstart --images` does for counting in one picture.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from whet.errors import WhetError
from whet.plugins.lessons.drawn.figures import two_images
from whet.plugins.lessons.drawn.videos import flashes
from whet.plugins.lessons.quickstart import PAGE, Lesson, quickstart
from whet.plugins.lessons.quickstart_images import read_back, write_model, write_problems

LESSONS = {
    "two_images": Lesson(
        goal="to compare two pictures",
        curve="Learning to compare two pictures with GRPO",
        recipe="two_images",
        warm_up="pictures_sft",
        warm_enough=0.55,
        write_problems=partial(
            write_problems, draw=two_images, num_trained=4096, ask="difference", prompt="<image><image>?"
        ),
        write_model=write_model,
        read_back=partial(read_back, question="How many more figures has the second picture?"),
        problem="first picture",
        page=PAGE,
    ),
    "video_flashes": Lesson(
        goal="to count in a video",
        curve="Learning to count the frames with a figure with GRPO",
        recipe="video_flashes",
        warm_up="pictures_sft",
        warm_enough=0.4,
        write_problems=partial(write_problems, draw=flashes, num_trained=2048, num_frames=6, prompt="<video>?"),
        write_model=write_model,
        read_back=partial(read_back, question="In how many frames is a figure?"),
        problem="first frame",
        page=PAGE,
    ),
}


def main() -> int:
    """Runs all stages of a lesson."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(LESSONS), help="the recipe")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; unset: runs/pictures/NAME")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        quickstart(options.run_dir or Path("runs/pictures") / options.name, options.seed, lesson=LESSONS[options.name])
    except WhetError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
