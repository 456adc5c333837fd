# SPDX-License-Identifier: Apache-2.0
def digits(solution_str: str, **_: object) -> float:
    """The number of digits in a response."""
    return float(sum(each.isdigit() for each in solution_str))
