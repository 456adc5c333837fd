# SPDX-License-Identifier: Apache-2.0
"""Small correct functions with calls that test them, for `python_repair`, which breaks them.

Each docstring ends with an example, `call is value`. The values that the tests expect are those of these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def clamp(value: int, low: int, high: int) -> int:
    """Returns the value, or the nearer bound outside of [low, high]: clamp(9, 0, 5) is 5."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def count_vowels(text: str) -> int:
    """Returns the number of vowels, capital ones too: count_vowels("Opera") is 3."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def is_leap_year(year: int) -> bool:
    """Tells whether a year of the Gregorian calendar is a leap year: is_leap_year(1900) is False."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def digit_sum(number: int) -> int:
    """Returns the sum of the decimal digits, without the sign: digit_sum(-204) is 6."""
    rest, total = abs(number), 0
    while rest > 0:
        total += rest % 10
        rest //= 10
    return total


def greatest_common_divisor(a: int, b: int) -> int:
    """Returns the greatest common divisor of numbers from 0: greatest_common_divisor(12, 18) is 6."""
    while b > 0:
        a, b = b, a % b
    return a


def is_prime(number: int) -> bool:
    """Tells whether a number is prime: is_prime(49) is False."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def fibonacci(index: int) -> int:
    """Returns a number of 0, 1, 1, 2, 3, 5, ... by its index from 0: fibonacci(6) is 8."""
    a, b = 0, 1
    for _ in range(index):
        a, b = b, a + b
    return a


def is_palindrome(text: str) -> bool:
    """Tells whether the letters read the same backwards, capital or not: is_palindrome("No, on!") is True."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    left, right = 0, len(letters) - 1
    while left < right:
        if letters[left] != letters[right]:
            return False
        left += 1
        right -= 1
    return True


def second_largest(numbers: list[int]) -> int | None:
    """Returns the second largest different number, None if there is none: second_largest([3, 9, 9, 4]) is 4."""
    largest, second = None, None
    for number in numbers:
        if largest is None or number > largest:
            largest, second = number, largest
        elif number != largest and (second is None or number > second):
            second = number
    return second


def running_sums(numbers: list[int]) -> list[int]:
    """Returns the sum of each beginning of a list: running_sums([1, 2, 3]) is [1, 3, 6]."""
    sums, total = [], 0
    for number in numbers:
        total += number
        sums.append(total)
    return sums


def binary_search(numbers: list[int], wanted: int) -> int:
    """Returns the index of a number in a sorted list without repetitions, else -1: binary_search([2, 5, 7], 7) is 2."""
    low, high = 0, len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == wanted:
            return middle
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def without_repetitions(values: list[int]) -> list[int]:
    """Returns the values, each where it comes first: without_repetitions([2, 1, 2]) is [2, 1]."""
    found = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def rotated(values: list[int], by: int) -> list[int]:
    """Returns the values, moved to the right, the last ones to the front: rotated([1, 2, 3], 1) is [3, 1, 2]."""
    if len(values) == 0:
        return []
    by = by % len(values)
    return values[len(values) - by :] + values[: len(values) - by]


def run_lengths(text: str) -> list[list[object]]:
    """Returns each run of a character with its length: run_lengths("aab") is [["a", 2], ["b", 1]]."""
    runs: list[list[object]] = []
    index = 0
    while index < len(text):
        end = index + 1
        while end < len(text) and text[end] == text[index]:
            end += 1
        runs.append([text[index], end - index])
        index = end
    return runs


def is_balanced(text: str) -> bool:
    """Tells whether the round and square brackets match: is_balanced("(a[1)]") is False."""
    opened: list[str] = []
    for letter in text:
        if letter in "([":
            opened.append(letter)
        elif letter in ")]" and (len(opened) == 0 or opened.pop() + letter not in ("()", "[]")):
            return False
    return len(opened) == 0


def merged(one: list[int], other: list[int]) -> list[int]:
    """Returns the numbers of two sorted lists, sorted: merged([1, 4], [2, 4]) is [1, 2, 4, 4]."""
    result, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        if one[i] < other[j]:
            result.append(one[i])
            i += 1
        else:
            result.append(other[j])
            j += 1
    return result + one[i:] + other[j:]


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Returns the columns of a table as rows: transposed([[1, 2], [3, 4]]) is [[1, 3], [2, 4]]."""
    if len(rows) == 0:
        return []
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def caesar(text: str, by: int) -> str:
    """Returns a text with its small letters moved along the alphabet, from z on to a: caesar("xyz", 2) is "zab"."""
    moved = ""
    for letter in text:
        if "a" <= letter <= "z":
            moved += chr((ord(letter) - 97 + by) % 26 + 97)
        else:
            moved += letter
    return moved


def to_binary(number: int) -> str:
    """Returns a number from 0 in binary digits: to_binary(6) is "110"."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % 2) + digits
        number //= 2
    return digits


def roman_value(text: str) -> int:
    """Returns the value of a Roman number: roman_value("XIV") is 14."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
    total = 0
    for index, letter in enumerate(text):
        if index + 1 < len(text) and values[letter] < values[text[index + 1]]:
            total -= values[letter]
        else:
            total += values[letter]
    return total


def longest_word(text: str) -> str:
    """Returns the first of the longest words: longest_word("as old as time") is "time"."""
    longest = ""
    for word in text.split():
        if len(word) > len(longest):
            longest = word
    return longest


def largest_sum(numbers: list[int]) -> int:
    """Returns the largest sum of neighbours, 0 for none of them: largest_sum([-2, 3, -1, 4]) is 6."""
    best, here = 0, 0
    for number in numbers:
        here = max(0, here + number)
        best = max(best, here)
    return best


def median(numbers: list[int]) -> float:
    """Returns the middle number, the mean of two middle ones: median([4, 1, 3, 2]) is 2.5."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def chunks(values: list[int], size: int) -> list[list[int]]:
    """Returns the values in lists of a size, the last perhaps shorter: chunks([1, 2, 3], 2) is [[1, 2], [3]]."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def collatz_steps(number: int) -> int:
    """Returns the steps to 1: half of an even number, three times an odd one plus 1: collatz_steps(6) is 8."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


CALLS: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    clamp: [(9, 0, 5), (-3, 0, 5), (2, 0, 5), (0, 0, 5), (5, 0, 5), (-7, -6, -2)],
    count_vowels: [("Opera",), ("xyz",), ("",), ("AEIOU and y",), ("tree",)],
    is_leap_year: [(1900,), (2000,), (2023,), (2024,), (2100,), (1600,)],
    digit_sum: [(-204,), (0,), (7,), (1999,), (10,), (-11,)],
    greatest_common_divisor: [(12, 18), (7, 5), (0, 4), (9, 0), (48, 36), (1, 1)],
    is_prime: [(49,), (2,), (1,), (0,), (97,), (4,), (15,), (3,)],
    fibonacci: [(6,), (0,), (1,), (2,), (12,)],
    is_palindrome: [("No, on!",), ("ab",), ("",), ("Abba",), ("abca",), ("x",), ("abccxa",)],
    second_largest: [([3, 9, 9, 4],), ([],), ([5],), ([5, 5],), ([1, 2, 3],), ([3, 2, 1],), ([2, 9, 4, 7],)],
    running_sums: [([1, 2, 3],), ([],), ([5],), ([2, -2, 4],)],
    binary_search: [([2, 5, 7], 7), ([2, 5, 7], 2), ([2, 5, 7], 5), ([2, 5, 7], 6), ([], 1), ([1, 2, 3, 4], 4)],
    without_repetitions: [([2, 1, 2],), ([],), ([1, 1, 1],), ([3, 2, 1],)],
    rotated: [([1, 2, 3], 1), ([1, 2, 3], 0), ([1, 2, 3], 5), ([], 4), ([7], 3), ([1, 2, 3, 4], -1)],
    run_lengths: [("aab",), ("",), ("a",), ("aabbba",), ("xyz",)],
    is_balanced: [("(a[1)]",), ("([])",), ("",), ("(",), (")",), ("a(b)c[d]",), ("(]",)],
    merged: [([1, 4], [2, 4]), ([], []), ([1], []), ([], [1]), ([1, 2, 3], [0, 9]), ([5, 6], [1, 2])],
    transposed: [([[1, 2], [3, 4]],), ([],), ([[1, 2, 3]],), ([[1], [2]],)],
    caesar: [("xyz", 2), ("Hello, you", 1), ("", 3), ("abc", 0), ("az", -1), ("abc", 27)],
    to_binary: [(6,), (0,), (1,), (2,), (255,), (8,)],
    roman_value: [("XIV",), ("III",), ("IX",), ("XLII",), ("XCIX",), ("C",)],
    longest_word: [("as old as time",), ("",), ("a bb cc",), ("one three seven",)],
    largest_sum: [([-2, 3, -1, 4],), ([],), ([-1, -2],), ([1, 2, 3],), ([4, -5, 3],), ([2, -1, 2],)],
    median: [([4, 1, 3, 2],), ([5],), ([3, 1, 2],), ([1, 9],), ([7, 7, 7, 1],)],
    chunks: [([1, 2, 3], 2), ([], 2), ([1, 2], 1), ([1, 2, 3, 4], 2), ([1], 5)],
    collatz_steps: [(6,), (1,), (2,), (7,), (27,)],
}
