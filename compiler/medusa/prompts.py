"""Prompts of our own that a model answers to give its heads something to learn from: patterns filled with subjects."""

from __future__ import annotations

import numpy as np

SUBJECTS = (
    *("bicycles", "volcanoes", "the sea", "bread", "winter", "bees", "old maps", "the human heart", "coffee"),
    *("chess", "railways", "dreams", "mountains", "a small town", "the Roman Empire", "gardens", "electric cars"),
    *("friendship", "sleep", "the Moon", "glass", "dogs", "libraries", "rivers", "the violin", "paper", "taxes"),
    *("a family dinner", "rice", "whales", "earthquakes", "photography", "running", "batteries", "the desert"),
    *("working from home", "vaccines", "clocks", "the French Revolution", "music lessons", "recycling", "plants"),
    *("a long journey", "job interviews", "the stock market", "cooking for one", "football", "artificial intelligence"),
    *("lightning", "the Middle Ages", "public transport", "a lost letter", "trees", "learning a language", "gravity"),
    *("the Internet", "healthy food", "honesty", "bridges", "the weather", "a birthday party", "solar energy"),
    *("cells", "inflation", "democracy", "Newton's laws", "atoms", "the water cycle", "evolution", "acids and bases"),
    *("marketing", "a start-up", "stress", "the Renaissance", "philosophy", "climate change", "databases", "elections"),
    *("computer networks", "statistics", "a museum", "theatre", "street food", "the city of Rome", "Japan", "Africa"),
    *(
        "a detective",
        "a dragon",
        "robots",
        "time travel",
        "the ocean floor",
        "an old house",
        "a rainy night",
        "islands",
    ),
    *("a new phone", "remote learning", "school uniforms", "exercise", "saving money", "planes", "the human brain"),
)
PATTERNS = (
    "Explain {} to a child of ten.",
    "Write a short story about {}.",
    "What are the most important facts about {}? Give a list.",
    "Write an email to a colleague about {}. Keep it short and polite.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "Give me five tips that have to do with {}.",
    "Write the introduction of an essay on {}.",
    "I want to know more about {}. Where should I begin?",
    "Describe {} in two paragraphs for a travel magazine.",
    "Write a dialogue between two friends who disagree about {}.",
    "Summarize what is known about {} in three sentences.",
    "Make a table with three columns about {}.",
    "How did {} change over the last hundred years?",
    "Pretend you are an expert on {} and answer: what do most people get wrong?",
    "Write an outline with headings for a talk about {}.",
    "Compare {} with something similar, point by point.",
    "Write a plan for a week that has to do with {}.",
    "Which questions would you ask somebody who knows a lot about {}?",
    "Rewrite this in a formal style: I guess {} is kind of a big deal, you know?",
    "You are a teacher. A student asks you about {}. What do you say?",
    "Speak like a pirate and tell me about {}.",
    "Imagine that you are a journalist who reports on {}. Begin your report.",
    "Why does {} matter? Give reasons and examples.",
    "Write a headline and an opening paragraph about {}.",
    "Write a blog post about {} for beginners.",
    "How does {} work? Explain it step by step.",
    "Discuss how {} has influenced society, in a few paragraphs.",
    "Describe a character whose life is all about {}.",
    "Write a review of a book about {}.",
    "What is the history of {}?",
    "Design a lesson on {} for a class of teenagers.",
    "Answer in three short bullet points: what should everybody know about {}?",
    "Write a persuasive speech about {}.",
    "List ten words that have to do with {} and explain each.",
)
TASKS = (
    *("reverses a string", "finds the largest number in a list", "counts the words of a text", "sorts a list"),
    *("checks whether a number is prime", "computes the average of a list", "reads a CSV file", "merges two lists"),
    *("removes duplicates from a list", "converts Celsius to Fahrenheit", "finds the n-th Fibonacci number"),
    *("validates an email address", "searches a sorted list", "prints a multiplication table", "parses a date"),
    *("counts how often each letter occurs", "implements a stack", "walks a binary tree", "flattens a nested list"),
    *("downloads a web page", "computes a factorial", "finds the longest common prefix", "rotates a matrix"),
    *("finds duplicates in a list", "checks for a palindrome", "counts the lines of a file", "sums the digits"),
    *("draws a triangle of stars", "converts a number to binary", "finds pairs with a given sum", "plays dice"),
    *("reverses a linked list", "computes the greatest common divisor", "groups words by length", "shuffles cards"),
)
CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}, with comments.",
    "Write a program in C++ that {}.",
    "How do I write code that {}? Explain each step.",
    "Write unit tests in Python for a function that {}.",
    "Write a Java class with a method that {}.",
    "My program {}, but it is slow. How can I make it faster? Show an example.",
    "Write a short program that {} and explain how much time and memory it needs.",
    "Write a web page in HTML with a button that {}.",
)
NUMBERS = (3, 4, 6, 7, 9, 12, 15, 18, 24, 35, 48, 60, 72, 90, 125, 240)
SUMS = (
    "A shop sells {0} apples for {1} dollars. How much do 5 apples cost? Show each step.",
    "Solve for x: {0}x + {1} = 100.",
    "What is {0} times {1}? Explain how you got there.",
    "A train goes {0} kilometres in {1} minutes. How fast is it in kilometres per hour?",
    "Anna is {0} years old, and her mother is {1} years older. How old is her mother? Think step by step.",
    "The sides of a rectangle are {0} and {1} centimetres long. What are its area and its perimeter?",
    "If f(x) = {0}x^2 + {1}, what is f(2)?",
    "In a bag there are {0} red and {1} blue balls. What is the probability that the first one drawn is red?",
)
NAMES = ("Maria", "Tom", "Aisha", "Chen", "Olga", "Peter", "Lena", "Samuel", "Ivan", "Grace", "Hugo", "Nina")
PLACES = (
    "Berlin",
    "Nairobi",
    "Lisbon",
    "Toronto",
    "Osaka",
    "Lima",
    "Oslo",
    "Cairo",
    "Denver",
    "Hanoi",
    "Athens",
    "Perth",
)
READING = (
    "Extract all names and places as JSON: {0} moved from {2} to {3} in 2015 and works there with {1}.",
    "Is this review positive or negative, and why? {0} writes: I stayed a week in {2}, and the hotel was too loud.",
    "{0} is taller than {1}, and {1} is taller than Kim from {2}. Who is the shortest? Explain.",
    "Correct the errors in this text: yesterday {0} go to {2} with {1}, they was very happy their.",
    "Translate into French and explain each word: {0} and {1} live in {2}.",
    "Summarize in one sentence: {0} and {1} met in {2} when they were students. Later they opened a small bakery in "
    "{3}, which soon became famous for its bread.",
    "Sort these into people and cities: {2}, {0}, {3}, {1}.",
)


def built_in(count: int, seed: int) -> list[str]:
    """So many different prompts, in an order that the seed gives; the same again from the start when there are no more.

    Of eight, one is about code, one about numbers, and one about a text that it holds.
    """
    random = np.random.default_rng(seed)
    general = [pattern.format(subject) for pattern in PATTERNS for subject in SUBJECTS]
    code = [pattern.format(task) for pattern in CODE for task in TASKS]
    sums = [pattern.format(a, b) for pattern in SUMS for a in NUMBERS for b in NUMBERS if a != b]
    pairs = [(a, b) for a in range(len(NAMES)) for b in range(len(NAMES)) if a != b]
    reading = [text.format(NAMES[a], NAMES[b], PLACES[a], PLACES[b]) for text in READING for a, b in pairs]
    pools = [[pool[i] for i in random.permutation(len(pool))] for pool in (general, code, sums, reading)]
    turn = (0, 0, 1, 0, 0, 2, 0, 3)
    taken = [0] * len(pools)
    result = []
    for number in range(count):
        kind = turn[number % len(turn)]
        result.append(pools[kind][taken[kind] % len(pools[kind])])
        taken[kind] += 1
    return result
