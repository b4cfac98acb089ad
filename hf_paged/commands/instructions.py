"""Word lists for `prompts.instruction_prompts`. The texts are this project's own."""

TASKS: tuple[str, ...] = (
    "Explain {topic}.",
    "Describe {topic}.",
    "Write a poem about {topic}.",
    "Write a short story about {topic}.",
    "List {count} facts about {topic}.",
    "Give me {count} tips on {topic}.",
    "What is special about {topic}?",
    "Why do people care about {topic}?",
    "Name {count} books about {topic}.",
    "Plan a lesson about {topic} for {audience}.",
    "Write a speech on {topic} for {audience}.",
    "What should {audience} know about {topic}?",
    "Compare {topic} with {other}.",
    "Which matters more to {audience}, {topic} or {other}?",
    "Write a dialogue in which {audience} argue about {topic}.",
)
TOPICS: tuple[str, ...] = (
    "bees",
    "tides",
    "chess",
    "snow",
    "inflation",
    "gravity",
    "old maps",
    "night trains",
    "baking bread",
    "lighthouse keepers",
    "learning to swim",
    "the water cycle",
    "growing tomatoes",
    "public libraries",
    "repairing a bicycle",
    "the history of glass",
    "sleeping under the stars",
    "saving energy at home",
    "how bridges carry their load",
    "the first walk on the moon",
    "writing letters by hand",
    "a village without a shop",
    "planting trees along a river",
    "keeping a diary while travelling",
    "the sound of a harbour in the morning",
    "choosing a musical instrument for a child",
    "what happens when a volcano goes quiet",
    "the way languages borrow words from each other",
)

AUDIENCES: tuple[str, ...] = (
    "beginners",
    "two neighbours",
    "young engineers",
    "a class of ten-year-olds",
    "people who have just moved to the country",
    "the members of a town council",
)

COUNTS: tuple[str, ...] = ("three", "five", "seven", "ten")

ADDITIONS: tuple[str, ...] = (
    " Keep it short.",
    " Use plain words.",
    " Give one example for each point you make.",
    " Write no more than {count} sentences, and avoid technical terms.",
    " Begin with the thing that surprises most people, and end with a question.",
    " Mention what it costs, how long it takes and what can go wrong on the way.",
    " If something is not known for certain, say so openly instead of guessing at it.",
)
"""What may be asked besides; up to two of them follow a task."""

PASSAGE_TASKS: tuple[str, ...] = (
    "Summarise this passage:",
    "Say in one sentence what the following passage is about:",
    "Find the most surprising statement in this passage and explain why it surprises you:",
    "Rewrite the following passage for a reader of twelve, and leave nothing important out:",
)
"""What is asked about a passage of the long document that follows."""
