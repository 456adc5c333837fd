# SPDX-License-Identifier: Apache-2.0
"""A CPO wrapper of your own: algorithm.adv_options.wrap_method=examples/algorithms/wrapper.py:surprised

It is one formula in the terms of `whet.algorithms.cpo.Terms`: what is added to each token's advantage.
"""

from torch import Tensor, where

from whet.algorithms.cpo import Terms


def surprised(t: Terms) -> Tensor:
    """right: + a+ abs(k) U;  wrong: - a- abs(k) (1 - U): the hint changes most what the policy was unsure of."""
    return where(t.right, t.pos * t.k.abs() * t.u, -t.neg * t.k.abs() * (1 - t.u))
