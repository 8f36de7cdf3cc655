#include "src/bench/workload.h"

namespace vivace::bench {

std::string_view prompt_text() {
  return R"(The river town of Alder Ford had one bridge, one bakery and one clock, and the clock was wrong. It had been
wrong for so long that the people had stopped trusting anything that agreed with it. When a traveller came through
and asked for the time, they pointed at the sun, or at the length of the shadow under the chestnut tree, and said
that it was early enough. Marta, who repaired instruments for a living, took this as a personal insult.

She climbed the tower on a cold morning in March with a lamp, a notebook and a bag of small brass screws. The
mechanism was larger than she had expected. Two weights hung in the dark shaft, each as heavy as a calf, and a
pendulum longer than she was tall swung between them with a slow and patient knock. She listened to it for an hour
before she touched anything. A machine, her teacher used to say, tells you what it needs if you let it finish its
sentence.

The fault was not where she had looked for it. The wheels were clean, the teeth were sound, and the escapement let
go of exactly one tooth with every swing. What had changed was the pendulum itself. In summer the iron rod grew
longer by less than the thickness of a coin, and the clock lost half a minute a day; in winter it shrank, and the
clock ran ahead. Over sixty years nobody had moved the small nut at the bottom that was put there for this purpose.
Nobody had known that it could be moved.

How do you correct something that is wrong by a different amount every week? Marta wrote down the temperature and the
error each morning, and after a month she drew a line through the points. The line was straight. From then on she
could say, on any day, how far the clock would drift before the next one, and she turned the nut by that amount. It
is a strange feeling to fix a thing with a pencil.

The baker was the first to notice. His bread had always come out of the oven when the clock struck six, and he had
learned to wait a little longer in July without ever asking why. Now the bread burned. He complained to the mayor,
the mayor complained to Marta, and Marta gave the baker a sheet of paper with two columns of numbers. He read it
twice. Then he laughed, and the next morning there was a warm loaf on the steps of the tower.

Measuring is easy to praise and hard to do. First you need to decide what counts: the moment the hammer falls, or the
moment the sound arrives on the other side of the square? The two differ by a third of a second, which matters to a
musician and to nobody else. Next you need to repeat the measurement, because a single reading tells you about the
day and not about the clock. Finally you have to write down what you did, so that somebody who does not believe you
can climb the same stairs and count the same swings.

By autumn people in Alder Ford had begun to arrive on time, and were surprised at how much of the day was left. The
ferry left when its passengers were there. The school bell and the church bell rang together, and dogs stopped
barking at the gap between them. An old man who had sat under the chestnut tree for years, telling the time from its
shadow, asked Marta whether he was no longer needed. She thought about it. Then she asked him to keep writing down
the length of the shadow at noon, because every clock should have a second clock that is not made of iron.

Here is a list of what she carried up the tower that winter: a feather for dust, a bottle of light oil, a magnifying
glass, a piece of chalk, a thermometer in a wooden case, three keys that opened nothing, and a letter from her
teacher. The letter said that the best repair is the one that the next person can understand. She had read it many
times, and she put it back under the lid of the mechanism, where the next person would find it.
)";
}

}  // namespace vivace::bench
