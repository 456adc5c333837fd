# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/view.md, from runs: `python -m docs.generate.view FOLDER`. They need playwright and Chromium.

FOLDER holds a run `addition`, a run `calculator` of several turns and a run `counting` with images."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from whet.plugins.viewer.server import open_server

DOCS = Path(__file__).parents[1]
TURNS = "tab=trajectories&run=calculator&kind=step&step=10&line=6"
SIZE = {"width": 1360, "height": 800}
COLOURS = 256
SHOTS = {  # by file: the scheme of colours, what the address says, the element that is waited for, the keys pressed
    "view_curves": ("light", "tab=curves", "figure canvas", ""),
    "view_tokens": ("dark", TURNS, ".tokens span", ""),
    "view_turns": ("light", TURNS, ".tokens span", "v"),
    "view_images": ("dark", "tab=trajectories&run=counting&kind=step", ".media img", ""),
    "view_time": ("light", "tab=time&run=addition", ".card canvas", ""),
}


def main(folder: Path, into: Path = DOCS) -> None:
    """Writes the pictures into docs/."""
    server = open_server(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--disable-gpu", "--no-sandbox"])
        for name, (scheme, address, element, keys) in SHOTS.items():
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/#{address}")
            page.wait_for_selector(element)
            for key in keys:
                page.keyboard.press(key)
            page.wait_for_timeout(400)
            file = into / f"{name}.png"
            page.screenshot(path=file)
            Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
            print(f"wrote {file}")
            page.close()
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
