"""What a reader would guess before any data: by how much a word or phrase lengthens an answer, in log tokens."""

from __future__ import annotations

WORDS: dict[str, float] = {
    word: weight
    for weight, words in {
        1.3: "essay story article blog screenplay script chapter tutorial curriculum itinerary roadmap documentation "
        "thesis dissertation whitepaper",
        0.9: "plan guide report speech dialogue conversation letter proposal lesson analysis analyze analyse compare "
        "contrast comprehensive detailed thorough extensive implement design strategy strategies recipe cook bake "
        "elaborate business website game app application monologue review",
        0.6: "write explain describe discuss steps ways tips ideas develop build outline poem song lyrics email "
        "prepare pros cons advantages disadvantages benefits evaluate program code python javascript java html "
        "create compose depth workout routine schedule examples long why causes history overview research paper "
        "process differences difference suggestions improve instructions activities explore impact effects",
        0.3: "how list give suggest recommend generate make function script sql help best things important factors "
        "types features questions reasons compare characters scenario work common should could different each "
        "describe affect develop learn teach role better good",
        -0.3: "who when where which correct grammar rewrite paraphrase edit rephrase summarize summary convert "
        "sentence title name find calculate many much old called",
        -0.6: "translate classify identify choose extract headline category sentiment synonym antonym acronym pun "
        "joke capital tweet label fix spelling slogan solve missing brief short concise simple shorten did was year "
        "born won detect determine true false emoji rhymes rate",
        -1.0: "yes no only word single quick briefly exactly just answer option tiny",
    }.items()
    for word in words.split()
}
OPENINGS: dict[str, float] = {
    word: weight
    for weight, words in {
        0.5: "write explain describe create develop how design compose tell discuss outline plan imagine build make",
        0.2: "give list provide why suggest generate can could act help show compare",
        -0.3: "what which convert rewrite summarize is are do does will find edit paraphrase i",
        -0.7: "who when where did was were translate classify identify choose extract calculate hi hello determine",
    }.items()
    for word in words.split()
}
PHRASES: dict[str, float] = {
    "step by step": 0.5, "in detail": 0.6, "pros and cons": 0.5, "one word": -2.0, "sentence": -0.6,
    "in one line": -1.2, "true or false": -1.2, "yes or no": -1.5, "how many": -0.8, "how much": -0.5, "how to": 0.3,
    "how do i": 0.4, "how can": 0.5, "how does": 0.4, "what are some": 0.6, "what are": 0.4, "difference": 0.5,
    "what is": -0.1, "who is": -0.3, "what would happen": 0.4, "tell me about": 0.4, "act as": 0.2,
    "following": -0.2, "given": -0.2, "list of": 0.3, "short story": -0.1, "in the world": -0.3,
    "from scratch": 0.4, "no more than": -0.3, "explain": 0.3, "n't explain": -1.0, "output:": -0.3,
    "step-by-step": 0.5,
}  # fmt: skip
"""Weights of phrases, found anywhere in lower-case text."""
