# SPDX-License-Identifier: Apache-2.0
"""A CPO wrapper of your own: algorithm.adv_options.wrap_method=examples/extending/wrapper.py:surprised

A wrapper is one formula of `whet.algorithms.cpo.Terms`. It returns the numbers that are added to token advantages.
"""

from torch import Tensor, where

from whet.algorithms.cpo import Terms


def surprised(t: Terms) -> Tensor:
    """right: + a+ abs(k) U;  wrong: - a- abs(k) (1 - U): raises uncertain tokens of right rows, lowers certain
    ones of wrong rows."""
    return where(t.right, t.pos * t.k.abs() * t.u, -t.neg * t.k.abs() * (1 - t.u))
