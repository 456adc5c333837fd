# SPDX-License-Identifier: Apache-2.0
"""Score functions, the signatures that they may have, and the processes in which they run.

result    the values that a score function may return, and the rule that reads them
adapter   the forms of a score function, recognised by signature
pool      `RewardPool`: score functions in processes with a hard deadline for each item
gsm8k math exact_match    the shipped score functions

Nothing here imports torch: a reward process starts fast.
"""
