"""Words that tell how long an answer is called for, by what they ask."""

from __future__ import annotations

_WORDS = {
    "compose": "write compose draft create generate produce author pen craft make",
    "long_form": "essay story article blog post speech letter report chapter novel script screenplay dialogue "
    "conversation review paper proposal plot monologue narrative biography email lyrics song scene "
    "tutorial guide lesson curriculum memo newsletter manual letters stories documentation",
    "short_form": "tweet haiku headline title slogan tagline caption name joke pun sentence phrase word limerick "
    "definition synonym antonym acronym subject emoji quote riddle",
    "explain": "explain describe discuss elaborate analyze analyse compare contrast evaluate illustrate outline "
    "interpret critique teach difference differences relationship explore examine overview introduce argue debate",
    "list": "list ideas tips ways examples suggestions steps reasons benefits advantages disadvantages pros cons "
    "recommend recommendations suggest brainstorm questions methods strategies features types options things "
    "activities books movies places causes symptoms uses items key",
    "plan": "plan recipe itinerary schedule routine design develop build prepare instructions program workout strategy "
    "cook budget roadmap implement menu syllabus recipes",
    "transform": "rewrite paraphrase rephrase correct fix edit translate convert improve transform reword simplify "
    "shorten modify change replace remove add reformat restate proofread combine fill complete turn reverse",
    "decide": "classify identify determine categorize choose select extract detect find label predict rate decide "
    "guess match check verify true false yes no sentiment spam category positive negative correctly option",
    "summarise": "summarize summarise summary tldr condense abstract gist recap highlights main",
    "compute": "calculate compute solve count sum average total probability equation percent percentage how_many "
    "evaluate integral derivative root multiply divide convert",
    "code": "code python javascript java function sql html css script program algorithm class regex bash api query "
    "json csv database c react rust sort array string excel formula docker linux pandas latex method golang php",
    "brief": "brief briefly short concise concisely shortly single only just quick quickly simple simply exactly "
    "without succinct maximum max limit less fewer shortest tiny",
    "detail": "detailed detail details comprehensive thorough thoroughly depth long longer extensive complete full "
    "elaborate specific step steps every thousand extended complex whole entire",
    "ask_open": "how why",
    "ask_what": "what whats which",
    "ask_fact": "who whom when where whose",
    "ask_yes": "is are was were does do did will would should has have am can could may might",
    "please": "please thanks thank kindly help want need",
    "you": "you your yourself i me my we our",
    "persona": "act imagine pretend role character roleplay assume suppose persona scenario interviewer",
    "greeting": "hi hello hey yo bye morning thanks lol",
}
CATEGORIES: tuple[str, ...] = tuple(_WORDS)
CATEGORY: dict[str, int] = {
    word: index for index, (_, words) in reversed(list(enumerate(_WORDS.items()))) for word in words.split()
}
"""The category of a word; of several the one told first."""

NUMBERS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "twelve": 12, "fifteen": 15, "twenty": 20, "fifty": 50, "hundred": 100, "a": 1, "an": 1, "single": 1,
    "couple": 2, "few": 3, "several": 4,
}  # fmt: skip

TOKENS_EACH = {
    "word": 1.35, "character": 0.25, "letter": 0.3, "token": 1.0, "sentence": 24.0, "line": 12.0, "paragraph": 95.0,
    "page": 500.0, "verse": 40.0, "stanza": 40.0, "essay": 600.0, "bullet": 25.0, "step": 30.0, "tip": 40.0,
    "way": 40.0, "idea": 35.0, "example": 30.0, "reason": 40.0, "question": 18.0, "item": 15.0, "point": 30.0,
    "name": 8.0, "title": 10.0, "fact": 30.0, "thing": 30.0, "day": 60.0, "book": 25.0, "movie": 20.0, "song": 15.0,
}  # fmt: skip
"""About how many tokens one of what is asked for has."""
