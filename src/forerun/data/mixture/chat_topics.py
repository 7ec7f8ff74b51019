"""Words for the gaps of the chat templates: data only."""

from __future__ import annotations

from forerun.data.mixture.templates import split_words

TOPICS = {
    "job": split_words(
        "a nurse, a beekeeper, a pastry chef, a lighthouse keeper, a software tester, a bus "
        "driver, a librarian, a detective, a kindergarten teacher, a sailor, a gardener, an "
        "astronaut, a watchmaker, a journalist, a vet, a park ranger, a tailor, a violin "
        "teacher, an archivist, a firefighter, a stage magician, a translator, a farmer, a civil "
        "engineer, a barista, a museum guide, a geologist, a referee, a potter, a night-shift "
        "pharmacist, a blacksmith, a data analyst, a wedding planner, a ferry captain, a chess "
        "coach, a botanist"
    ),
    "place": split_words(
        "a small fishing village, a desert market, a mountain railway, an old library, a night "
        "train, a greenhouse in winter, a busy harbour, a rooftop garden, a forest after rain, a "
        "quiet island, a space station, a flooded city, a castle kitchen, a ski resort in "
        "summer, a bakery at dawn, a school on the last day of term, a hospital waiting room, a "
        "travelling circus, a lakeside cabin, an abandoned theme park, a flea market, a canal "
        "town, a research base in Antarctica, a vineyard, a railway museum, a football stadium, "
        "a jungle river, a village fair"
    ),
    "city": split_words(
        "Lisbon, Kyoto, Nairobi, Montreal, Istanbul, Buenos Aires, Edinburgh, Hanoi, Prague, "
        "Seoul, Cape Town, Mexico City, Vienna, Marrakesh, Copenhagen, Mumbai, New Orleans, "
        "Athens, Melbourne, Reykjavik, Cusco, Singapore, Porto, Chicago, Krakow, Havana, "
        "Vancouver, Florence"
    ),
    "hobby": split_words(
        "knitting, bird watching, rock climbing, baking bread, playing the ukulele, chess, "
        "gardening, photography, stargazing, pottery, running, learning Spanish, calligraphy, "
        "woodworking, cycling, painting with watercolours, yoga, fishing, origami, juggling, "
        "swimming, cooking, board games, creative writing, collecting stamps, hiking, dancing "
        "salsa, home brewing, drawing comics, keeping bees, programming, playing the piano, "
        "sailing, geocaching"
    ),
    "issue": split_words(
        "banning cars from city centres, a four-day working week, school uniforms, working from "
        "home, homework for young children, keeping pets in flats, free public transport, "
        "electric cars, nuclear power, zoos, online shopping, social media for teenagers, "
        "tipping in restaurants, space tourism, a tax on sugar, learning two languages from "
        "birth, self-driving cars, exams without notes, buying second-hand clothes, video games "
        "in the classroom, daylight saving time, universal basic income, renting instead of "
        "buying a home, eating less meat, plastic packaging, open-plan offices, robots in "
        "hospitals, tourism in small towns, gap years before university, paying with cash, wind "
        "turbines near villages, voting at 16"
    ),
    "product": split_words(
        "a reusable water bottle, a folding bicycle, noise-cancelling headphones, a budget "
        "laptop, a solar lamp, an electric kettle, a language app, a hiking backpack, a smart "
        "watch, a plant subscription box, a robot vacuum, a rain jacket, a digital camera, a "
        "standing desk, a coffee grinder, a meal kit service, a wooden toy train, a fountain "
        "pen, a camping stove, an e-book reader, a board game about trains, a sleep mask, a "
        "bicycle helmet, an air fryer"
    ),
    "animal": split_words(
        "an octopus, a fox, a hedgehog, a penguin, an elephant, a crow, a tortoise, a dolphin, a "
        "bat, a honeybee, a wolf, a snail, an owl, a polar bear, a chameleon, a beaver, a cat, a "
        "spider, a salmon, a parrot, a kangaroo, a sloth, a horse, a firefly, a seal, a mouse"
    ),
    "object": split_words(
        "a broken clock, a red umbrella, a lost letter, a rusty key, a wooden boat, a pair of "
        "glasses, an old map, a talking mirror, a paper lantern, a blue door, a music box, a "
        "chipped teacup, a train ticket, a silver coin, a snow globe, a compass, a typewriter, a "
        "kite, a suitcase, a torn photograph, a lighthouse lamp, a chess piece, a violin, a "
        "stone with a hole in it"
    ),
    "feeling": split_words(
        "homesickness, curiosity, stage fright, gratitude, boredom, pride, jealousy, relief, "
        "courage, loneliness, hope, surprise, impatience, forgiveness, nostalgia, embarrassment, "
        "trust, joy"
    ),
    "audience": split_words(
        "a ten-year-old, a complete beginner, my grandmother, a curious teenager, a new "
        "colleague, a class of nine-year-olds, a busy manager, someone who hates maths, a "
        "visitor from abroad, a first-year student, a farmer, a friend who is a musician"
    ),
    "tone": split_words(
        "friendly, formal, humorous, calm, lively, dry, poetic, playful, "
        "matter-of-fact, dramatic, sarcastic, warm"
    ),
    "dish": split_words(
        "vegetable curry, mushroom risotto, lentil soup, apple pie, fried rice, shakshuka, "
        "gnocchi, pancakes, chili, roast chicken, potato salad, banana bread, ramen, paella, "
        "falafel, quiche, tomato soup, stuffed peppers, dumplings, focaccia, fish tacos, rice "
        "pudding, ratatouille"
    ),
    "concept": split_words(
        "inflation, gravity, photosynthesis, supply and demand, machine learning, compound "
        "interest, evolution, the water cycle, encryption, vaccines, black holes, the greenhouse "
        "effect, DNA, recursion, electricity, probability, the immune system, plate tectonics, "
        "blockchain, tides, friction, the placebo effect, natural selection, opportunity cost, "
        "radioactivity, entropy, neural networks, the speed of light, confirmation bias, "
        "fermentation, the internet, magnets, a database index, hash tables, version control, "
        "binary numbers, cloud computing, GDP, the doppler effect, antibiotics, exchange rates, "
        "democracy, quantum computers, relativity, chemical bonds, osmosis, insurance, operating "
        "systems, satellites, the carbon cycle"
    ),
    "era": split_words(
        "ancient Egypt, the Roman Empire, medieval Europe, the Renaissance, the Industrial "
        "Revolution, the Ottoman Empire, feudal Japan, the age of sail, the French Revolution, "
        "the Cold War, the Silk Road, the Viking Age, the Great Depression, the Space Race, the "
        "Inca Empire, the Enlightenment, the Mughal Empire, ancient Greece, the Gold Rush, the "
        "Victorian era"
    ),
    "event": split_words(
        "a birthday party, a school fundraiser, a company retreat, a street festival, a book "
        "club, a wedding on a small budget, a science fair, a charity run, a farewell party, a "
        "film night, a neighbourhood clean-up, a cooking class, a family reunion, a job fair, a "
        "chess tournament"
    ),
    "person": split_words(
        "my landlord, my boss, a customer, my neighbour, a former teacher, the city council, a "
        "client, a hotel, my team, a professor, a colleague who is leaving, an old friend, the "
        "school board, a supplier, a job applicant, my sports club, an airline, a conference "
        "organiser"
    ),
    "matter": split_words(
        "a late delivery, a change of schedule, a broken heater, a missed appointment, a refund, "
        "a recommendation letter, noise at night, a joint project, an invitation to lunch, a pay "
        "rise, a lost package, a deadline that moved, moving to another city, a mistake in an "
        "invoice, a new opening time, feedback on a draft, a parking space, a volunteer day, a "
        "software update"
    ),
    "genre": split_words(
        "mystery, science fiction, fantasy, comedy, ghost story, romance, adventure, fable, "
        "thriller, fairy tale, historical fiction, western"
    ),
    "number": split_words("three, four, five, six, seven, eight, ten"),
    "form": split_words(
        "haiku, limerick, sonnet, free-verse poem, ballad, rhyming poem, acrostic poem"
    ),
    "philosophy": split_words(
        "stoicism, utilitarianism, existentialism, free will, the social contract, scepticism, "
        "virtue ethics, the trolley problem, personal identity, justice, pragmatism, the meaning "
        "of happiness, knowledge and belief, moral relativism, beauty, civil disobedience, "
        "Buddhism"
    ),
    "art": split_words(
        "Impressionism, jazz, Gothic architecture, the novel, silent film, opera, photography, "
        "ballet, street art, the Baroque, folk music, surrealism, hip-hop, Greek tragedy, haiku, "
        "animation"
    ),
}
