# SPDX-License-Identifier: Apache-2.0
"""Judging answers: score functions, the forms that users write them in, and the processes that they run in.

result    what a score function may return, and the one rule that reads it
adapter   the forms of a score function, told apart by signature
pool      `RewardPool`: score functions in processes with a hard deadline an item
gsm8k math exact_match    the shipped score functions

Nothing here imports torch, save for a function that asks for a DataProto: a reward process starts in a blink.
"""
