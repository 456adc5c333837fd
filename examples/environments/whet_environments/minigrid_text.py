# SPDX-License-Identifier: Apache-2.0
"""Text of MiniGrid, whose observations are arrays: a function for the option `render` of `gymnasium`.

    pip install './examples/environments[minigrid]'
    whet env play gymnasium --option env_id=minigrid:MiniGrid-Empty-5x5-v0 \\
        --option "actions=[left,right,forward,pickup,drop,toggle,done]" \\
        --option render=whet_environments.minigrid_text:whole

A cell is two characters: kind and colour of an object, as in MiniGrid's own text (`WG` is a grey wall, `GG` the green
goal, `K` a key, `D` a door, `L` a locked one), `__` for an open door, two blanks for floor, `??` for a cell that is
hidden, and `^^`, `>>`, `VV` or `<<` for the player, who looks that way.
"""

from __future__ import annotations

from typing import Any

PLAYER = (">>", "VV", "<<", "^^")  # by direction
KINDS = {"wall": "W", "floor": "F", "door": "D", "key": "K", "ball": "A", "box": "B", "goal": "G", "lava": "V"}


def whole(env: Any) -> str:
    """The mission, the whole map, and the object that the player carries."""
    world = env.unwrapped
    return _text(world, world.grid, tuple(world.agent_pos), PLAYER[world.agent_dir])


def view(env: Any) -> str:
    """The mission, the cells that the player sees, and the object that the player carries. The player is in the middle
    of the last row and looks up."""
    world = env.unwrapped
    seen, is_visible = world.gen_obs_grid()
    return _text(world, seen, (seen.width // 2, seen.height - 1), PLAYER[3], is_visible)


def _text(world: Any, grid: Any, player: tuple[int, int], sign: str, is_visible: Any = None) -> str:
    rows = []
    for y in range(grid.height):
        cells = [_cell(grid.get(x, y), is_visible is None or bool(is_visible[x, y])) for x in range(grid.width)]
        if y == player[1]:
            cells[player[0]] = sign
        rows.append("".join(cells).rstrip())
    held = f"\n\nYou carry a {world.carrying.color} {world.carrying.type}." if world.carrying else ""
    return f"Mission: {world.mission}.\n\n" + "\n".join(rows) + held


def _cell(thing: Any, is_visible: bool) -> str:
    if not is_visible:
        return "??"
    if thing is None:
        return "  "
    if thing.type == "door" and thing.is_open:
        return "__"
    kind = "L" if thing.type == "door" and thing.is_locked else KINDS.get(thing.type, "?")
    return kind + str(thing.color[0]).upper()
