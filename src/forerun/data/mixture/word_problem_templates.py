"""The stories of word_problems.py: data only. Gaps are explained in templates.py."""

from __future__ import annotations

TEMPLATES = (
    "{girl} buys {a:3-9} boxes of {thing} with {b:12-48/6} in each box. She keeps {c:10-30} for "
    "herself and shares the rest equally among {d:2-4} friends. || How many {thing} are left to "
    "share? | How many {thing} does each friend get, and how many are left over?",
    "A bakery makes {a:40-120/10} {food} every morning. It sells {b:20-35} before noon at "
    "${c:2-5} each and the rest after noon at half price. || How much money does the bakery take "
    "in a day? | How much less would it take in a day if nothing were sold before noon?",
    "{boy} saves ${a:5-25} each week from his job and ${b:2-10} a week from pocket money. He "
    "wants a bicycle that costs ${c:180-420/20}, and he already has ${d:20-60/10}. || How many "
    "weeks must he save? | How much will he still need after 6 weeks?",
    "A train leaves with {a:120-280/10} passengers. At the first stop {b:15-50} get off and "
    "{c:10-45} get on. At the second stop a tenth of the people who started the trip get off. || "
    "How many passengers are on the train now? | How many people have left the train so far?",
    "{girl} reads {a:12-30} pages on each weekday and {b:30-60} pages on each day of the "
    "weekend. || How many pages does she read in {c:3-8} weeks? | Her book has {d:400-900/50} "
    "pages. How many full weeks does she need to finish it?",
    "A farmer has {a:20-60} {animal} and twice as many {animal2}. He sells a quarter of all his "
    "animals at ${b:40-120/10} each. || How much money does he make? | How many animals does he "
    "have left?",
    "{boy} and {girl} run a lemonade stand. A cup costs them ${a:1-2} to make and they sell it "
    "for ${b:3-6}. They sell {c:15-40} cups on {day} and {d:20-55} on {day2}. || What is their "
    "total profit? | They split the profit equally. How much does each of them get?",
    "A cinema has {a:12-28} rows of {b:14-30} seats. For the evening film {c:60-90/10} percent "
    "of the seats are sold at ${d:8-15} each. || How many seats are empty? | How much does the "
    "cinema take for the evening film?",
    "{girl} drives {a:45-75/5} miles per hour for {b:2-5} hours, stops for lunch, and then "
    "drives {c:30-60/5} miles per hour for {d:2-4} more hours. || How far does she drive "
    "altogether? | Her car needs one gallon for every 30 miles. How many gallons does the trip "
    "take?",
    "A class of {a:20-32/4} students goes to the {place}. Half of them pay the full price of "
    "${b:6-14/2} and the rest pay half price. The bus costs ${c:80-200/20}. || What does the "
    "trip cost in total? | If everyone shares the total cost equally, how much does each student "
    "pay?",
    "{boy} is {a:3-9} years older than {girl}. In {b:4-12} years {girl} will be {c:20-35}. || "
    "How old is {boy} now? | What is the sum of their ages today?",
    "A tank holds {a:200-900/50} litres of water. It loses {b:3-9} litres an hour through a leak "
    "and gains {c:10-20} litres an hour from a pipe. It starts with {d:20-90/10} litres. || How "
    "much water is in the tank after {e:5-12} hours? | How long does it take until the tank is "
    "full?",
    "{girl} plants {a:6-15} rows of {plant} with {b:8-20} in each row. {c:10-40} of them do not "
    "come up, and she gives a third of the rest away. || How many {plant} does she keep? | How "
    "many {plant} did she give away?",
    "A {job} charges ${a:35-90/5} per hour plus a call-out fee of ${b:20-60/10}. On {day} there "
    "are {c:2-5} jobs of {d:1-4} hours each. || How much does the {job} earn on {day}? | How "
    "much of the money earned on {day} is call-out fees, as a percentage?",
    "{boy} has {a:60-150/10} {thing}. He gives {b:10-40/5} percent of them to {girl}, who "
    "already had {c:15-60}. || How many {thing} does {girl} have now? | How many more {thing} "
    "does {boy} have than {girl} after that?",
    "A recipe for {a:4-6} people needs {b:2-5} cups of flour, {c:1-3} cups of sugar and {d:2-6} "
    "eggs. {girl} is cooking for {e:12-36/12} people. || How many eggs does she need? | How many "
    "cups of flour and sugar does she need altogether?",
    "A shop sells shirts for ${a:15-45/5} and trousers for ${b:30-80/10}. {boy} buys {c:2-5} "
    "shirts and {d:1-3} pairs of trousers and has a coupon for {e:10-25/5} percent off. || How "
    "much does he pay? | How much does the coupon save him?",
    "{girl} walks her dog {a:2-3} times a day for {b:15-40/5} minutes each time. Her brother "
    "walks it once a day for {c:20-45/5} minutes. || For how many hours is the dog walked in a "
    "week? | How many more minutes a week does {girl} walk the dog than her brother?",
    "A school orders {a:8-20} packs of paper with {b:100-500/100} sheets each. Every class uses "
    "{c:20-60/10} sheets a day and there are {d:5-12} classes. || How many full days will the "
    "paper last? | How many sheets are left after {e:2-5} days?",
    "{boy} swims {a:10-40/2} laps on {day} and half as many on {day2}. On {day3} he swims "
    "{b:5-15} laps more than on {day}. A lap is {c:25-50/25} metres. || How many metres does he "
    "swim in the three days? | What is the average number of laps per day?",
    "An orchard has {a:15-40} trees and each tree gives {b:80-200/20} {fruit}. The {fruit} are "
    "packed in crates of {c:20-40/20}. || How many crates are filled? | A crate sells for "
    "${d:9-18}. How much money does the orchard earn?",
    "{girl} has ${a:100-300/20}. She spends a quarter of it on shoes, half of what is left on a "
    "coat, and ${b:5-15} on lunch. || How much money does she have left? | How much did the "
    "shoes and the coat cost together?",
    "A bus makes {a:6-14} trips a day and carries {b:25-50} people on each trip. A ticket costs "
    "${c:2-4}. Fuel and wages cost ${d:200-500/50} a day. || What is the profit for one day? | "
    "What is the profit for a week of {e:5-7} days?",
    "{boy}'s phone plan costs ${a:15-35/5} a month with {b:3-10} gigabytes included. Every extra "
    "gigabyte costs ${c:2-8}. In {month} he uses {d:12-20} gigabytes. || How much does he pay in "
    "{month}? | How much would he save with a plan that costs ${e:45-60/5} without limits?",
    "In a garden there are {a:12-40/4} {plant}. There are half as many {plant2} and three times "
    "as many {plant3} as {plant2}. || How many plants are there in total? | How many more "
    "{plant3} than {plant} are there?",
    "{girl} can type {a:40-80/5} words a minute and {boy} can type {b:25-38} words a minute. "
    "They split a text of {c:3000-6000/500} words in two equal halves. || How many minutes after "
    "{girl} does {boy} finish? | How many words have both typed together after {d:10-25/5} "
    "minutes?",
    "A factory makes {a:120-360/20} lamps a day. {b:5-10/5} percent of them are faulty and "
    "thrown away; the rest are packed in boxes of {c:4-6/2}. || How many boxes are packed in a "
    "day? | How many faulty lamps are thrown away in {d:10-20/5} days?",
    "{boy} bought {a:4-12} notebooks for ${b:2-5} each and {c:3-9} pens. He paid with a "
    "${d:100-100} bill and got ${e:10-20} back. || How much did one pen cost? | How much did all "
    "the pens cost?",
    "{girl} makes bracelets. Each takes {a:18-30/2} beads and {b:20-45/5} minutes. She has "
    "{c:500-1500/100} beads. || How many bracelets can she make, and how many beads are left? | "
    "How many hours does she need for {d:8-16/4} bracelets?",
    "A {place} has {a:300-900/50} visitors on {day}. On {day2} it has {b:10-50/10} percent more. "
    "A third of the visitors on {day2} are children. || How many children visit on {day2}? | How "
    "many people visit on both days together?",
    "{boy} delivers newspapers to {a:40-90/5} houses, {b:6-7} days a week. He earns {c:5-20/5} "
    "cents for each paper and about ${d:10-30} a week in tips. || How much does he earn in a "
    "week? | How much does he earn in {e:3-6} weeks?",
    "Two friends, {girl} and {girl2}, collect {fruit}. {girl} picks {a:3-8} baskets with "
    "{b:15-35} {fruit} in each. {girl2} picks {c:20-60} fewer {fruit} than {girl}. || How many "
    "{fruit} do they have together? | They need 12 {fruit} for a jar of jam. How many jars can "
    "they fill together?",
    "A rectangular garden is {a:8-24/2} metres long and half as wide. {boy} puts a fence around "
    "it that costs ${b:6-15} per metre, and a gate for ${c:40-90/10}. || What does he pay in "
    "total? | What is the area of the garden, and how much does the fence cost without the gate?",
    "{girl}'s class sells raffle tickets for ${a:2-5} each. {b:18-30} students sell {c:6-15} "
    "tickets each. The prizes cost ${d:60-150/10}. || How much money does the class keep? | How "
    "many more tickets must they sell to keep ${e:700-900/100} more?",
    "A jar holds {a:20-50} red, {b:15-40} blue and {c:10-35} green {thing}. {boy} adds twice as "
    "many green {thing} as there are now and takes out half a dozen red ones. || How many "
    "{thing} are in the jar now? | How many more green than red {thing} are in the jar now?",
    "A hiker climbs {a:300-500/50} metres in the first hour, {b:200-280/20} in the second and "
    "half of that in the third. The summit is {c:1200-1800/100} metres above the start. || How "
    "many metres are left to climb after three hours? | What is the average climb per hour so "
    "far?",
    "{boy} has a {a:120-240/20}-page album. He fills {b:4-8} pages a day for {c:10-14} days and "
    "then {d:2-3} pages a day. || How many more days does he need to fill the album? | How many "
    "pages are filled after 20 days?",
    "A restaurant has {a:8-20} tables for four and {b:5-12} tables for six. On {day} three "
    "quarters of all the seats are taken and every guest spends ${c:12-30/2}. || How many guests "
    "are there on {day}? | How much do all guests spend on {day}?",
    "{girl} borrows ${a:400-1200/100} from her aunt. She pays back ${b:30-60/10} a month for "
    "{c:4-6} months and then doubles her payments. || How many more months does it take her to "
    "pay back everything? | How much does she still owe after 8 months?",
    "A printer prints {a:12-30/2} pages a minute. An office has to print {b:8-20} copies of a "
    "report of {c:24-60/6} pages. || How many minutes does this take? | A second printer prints "
    "half as fast. How long does it take with both?",
    "{boy} mixes {a:2-6} litres of juice with three times as much water and pours it into "
    "bottles of {b:2-2} litres. || How many bottles does he fill? | He sells a bottle for "
    "${c:3-7}. How much does he get for all of them?",
    "A parking garage charges ${a:3-6} for the first hour and ${b:2-4} for every further hour, "
    "with a daily maximum of ${c:18-25}. {girl} parks for {d:4-9} hours on {day}. || How much "
    "does she pay? | How much does she pay if she does the same on {e:2-5} days?",
    "There are {a:24-60/6} students in the choir. Two thirds are girls. A quarter of the girls "
    "and half of the boys also play an instrument. || How many students in the choir play an "
    "instrument? | How many boys in the choir do not play an instrument?",
    "{girl} is training for a race. In the first week she runs {a:8-15} kilometres and each week "
    "she adds {b:2-4} kilometres. || How far does she run in the first {c:4-8} weeks together? | "
    "In which week does she first run more than {d:25-40} kilometres?",
    "A box of {a:6-12/2} {food} costs ${b:9-18/3}. {boy} needs {c:40-90} {food} for a party. || "
    "How many boxes must he buy, and what do they cost? | How many {food} are left over if every "
    "one of {d:18-20} guests eats two?",
    "{boy} cuts a rope of {a:30-90/5} metres into pieces of {b:3-5} metres. He uses {c:2-5} "
    "pieces for a swing and sells the other whole pieces for ${d:2-6} each. || How much money "
    "does he get? | How many metres of rope are too short to be a piece?",
    "An aquarium has {a:3-7} tanks with {b:18-40} fish each. Each fish eats {c:2-5} grams of "
    "food twice a day. || How many grams of food are needed in a day? | A bag holds 5000 grams. "
    "How many full days does one bag last?",
    "{girl} earns ${a:14-28} an hour and is paid one and a half times as much for every hour "
    "beyond 40 in a week. She works {b:42-54/2} hours this week. || How much does she earn this "
    "week? | How much of her pay this week comes from the extra hours?",
    "A charity packs {a:150-400/50} bags of groceries. Each bag holds {b:2-4} cans and {c:1-3} "
    "packs of rice. A can costs ${d:1-2} and a pack of rice ${e:3-4}. || How much does the food "
    "cost? | How many cans and packs of rice are needed altogether?",
    "A game awards {a:5-15/5} points for every star and takes away {b:2-4} points for every "
    "mistake. {boy} collects {c:14-30} stars and makes {d:3-9} mistakes. {girl} collects "
    "{e:10-25} stars without a mistake. || Who has more points, and by how many? | How many "
    "points do they have together?",
    "A cyclist and a walker start at the same place and go the same way. The cyclist travels "
    "{a:12-24/2} kilometres per hour, the walker {b:4-6}. || How far apart are they after "
    "{c:2-5} hours? | The cyclist turns back after 3 hours. How far has the walker gone by then?",
    "{girl} bakes {a:5-9} trays of {b:12-24/6} cookies. Her family eats a sixth of them, and she "
    "packs the rest in bags of {c:5-10/5}. || How many full bags does she get? | She sells the "
    "bags for ${d:4-9} each. How much does she take at most?",
    "A town has {a:4000-9000/500} people. Every year {b:100-300/20} people move in and "
    "{c:60-90/10} move away. || How many people live there after {d:4-10} years? | After how "
    "many years has the town grown by more than 1000 people?",
    "The sum of three numbers is {a:60-150/6}. The second is twice the first and the third is "
    "three times the first. || What are the three numbers? | What is the product of the smallest "
    "and the largest number?",
    "{boy} has {a:8-20} quarters, {b:10-30} dimes and twice as many nickels as quarters. || How "
    "much money does he have in dollars? | How many coins must he add to have {c:90-99} coins?",
    "A pool is {a:20-50/5} metres long, {b:8-15} metres wide and {c:2-3} metres deep. It is "
    "filled at {d:20-60/10} cubic metres an hour. || How many hours does it take to fill the "
    "pool? | How much water is in the pool after 3 hours?",
    "In a spelling contest {girl} gets {a:15-30} words right, {boy} gets {b:3-9} more than her, "
    "and {girl2} gets two thirds as many as {boy} and {girl} together. || How many words does "
    "{girl2} get right, rounded to the nearest whole number? | How many words do {girl} and "
    "{boy} get right together?",
    "A carpenter makes chairs with {a:4-4} legs and stools with {b:3-3} legs. This week he used "
    "{c:60-120/6} legs, and he made {d:6-12/3} stools. || How many chairs did he make? | He "
    "sells a chair for ${e:45-90/5} and a stool for half of that. How much does he earn this "
    "week?",
    "{girl} has a {a:2-5}-metre shelf. Thick books take {b:4-5} centimetres and thin books take "
    "{c:1-2} centimetres. She puts {d:20-40} thick books on it. || How many thin books still "
    "fit? | How many centimetres of the shelf are free?",
    "An airline allows {a:20-25} kilograms per bag and charges ${b:8-15} for each kilogram above "
    "that. {boy} has {c:2-3} bags of {d:26-32} kilograms each. || How much does he have to pay? "
    "| How much would he save by moving 5 kilograms to his hand luggage?",
    "{boy} and his {a:2-4} brothers share {b:3-6} pizzas cut into {c:8-12/4} slices each. Each "
    "of them eats {d:3-5} slices. || How many slices are left? | What fraction of the pizza is "
    "left?",
    "A shop owner buys {a:30-80/10} umbrellas for ${b:6-10} each. She sells three fifths of them "
    "for ${c:14-20} and the rest for ${d:9-12}. || What is her profit? | How much more did the "
    "first group of umbrellas bring in than the second?",
    "At noon it is {a:18-30} degrees. The temperature falls {b:2-4} degrees an hour for {c:3-5} "
    "hours and then half as fast for {d:2-4} hours. || What is the temperature at the end? | By "
    "how many degrees did the temperature fall in total?",
    "{girl} wants to read {a:24-60/12} books in a year. By the end of {month} she has read a "
    "third of them, and she reads {b:3-5} books in each month after that. || How many books are "
    "left after two more months? | How many more months does she need to reach her goal?",
    "A delivery van carries {a:60-140/10} parcels. It delivers {b:8-14} parcels an hour for "
    "{c:3-4} hours, then picks up {d:15-35} new ones. || How many parcels are in the van now? | "
    "How many hours does it take to deliver everything in the van now at the same rate?",
    "{boy}'s grandmother is {a:4-6} times as old as he is. In {b:5-10} years he will be "
    "{c:16-24}. || How old is his grandmother now? | How old was his grandmother when he was "
    "born?",
)
