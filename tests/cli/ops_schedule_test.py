"""ops schedule: the map as a document, every piece of it walked, and as a drawing."""

import json
import pathlib
import re
import tempfile
import time

from vivace import Case, SANITIZED, main, vivace


def parsed(lengths):
    """The lengths of 1x128K+31x4K."""
    out = []
    for term in lengths.split("+"):
        requests, tokens = term.split("x")
        out += [int(float(tokens.rstrip("K")) * (1024 if tokens.endswith("K") else 1))] * int(requests)
    return out


class Schedule(Case):
    def map_of(self, lengths, heads, *args):
        return self.ok("ops", "schedule", "--lengths", lengths, "--heads", heads, *args, "--json", "-").json

    def walk(self, got, units):
        """Every tile of every unit once and in order. The weight of each worker, pieces of each unit, slots in use."""
        weights, pieces_of, slots = [], [0] * len(units), []
        unit, at, begun = 0, units[0][2], False
        for number, worker in enumerate(got["map"]):
            self.assertEqual(worker["worker"], number)
            weight = 0
            for entry in worker["pieces"]:
                self.assertEqual((entry["request"], entry["head"], entry["first_tile"]), (*units[unit][:2], at))
                for nth in range(entry["times"]):
                    _, _, first, end = units[unit]
                    weight += max(1, entry["tiles"]) + (0 if begun else got["request_cost"])
                    at, begun = at + entry["tiles"], True
                    pieces_of[unit] += 1
                    self.assertEqual(entry["slot"] is None, first + entry["tiles"] == end)
                    if entry["slot"] is not None:
                        slots.append(entry["slot"] + nth)
                    if got["piece_tiles"]:
                        self.assertLessEqual(entry["tiles"], got["piece_tiles"])
                    self.assertLessEqual(at, end)
                    if at == end:
                        unit, begun = unit + 1, False
                        at = units[unit][2] if unit < len(units) else 0
            self.assertEqual(worker["weight"], weight)
            weights.append(weight)
        self.assertEqual(unit, len(units), "every unit is done")
        return weights, pieces_of, slots

    def check(self, lengths, heads, *args):
        got = self.map_of(lengths, heads, *args)
        cost, window, group, tile = (got[key] for key in ["request_cost", "window", "piece_tiles", "tile_tokens"])
        keys_of = parsed(lengths)
        units = []  # (request, head, first tile, end)
        for request, keys in enumerate(keys_of):
            first = max(0, keys - got["query_tokens"] + 1 - window) // tile if window and keys else 0
            units += [(request, head, first, -(-keys // tile)) for head in range(got["heads_kv"])]
        weights, pieces_of, slots = self.walk(got, units)
        weights = [weight for weight in weights if weight > 0]
        self.assertEqual(len(weights), got["used_workers"])
        self.assertEqual((sum(weights), max(weights)), (got["weight"], got["heaviest"]))
        self.assertAlmostEqual(got["imbalance"], max(weights) * len(weights) / sum(weights))
        self.assertAlmostEqual(got["share_waiting"], 1 - 1 / got["imbalance"])
        self.assertAlmostEqual(got["share_starting"], cost * len(units) / len(weights) / max(weights))
        self.assertLessEqual(max(weights), -(-sum(weights) // len(weights)) + cost + max(0, group - 1))
        self.assertEqual((got["units"], got["tiles"]), (len(units), sum(end - first for _, _, first, end in units)))
        self.assertEqual((got["pieces"], got["partials"]), (sum(pieces_of), len(slots)))
        self.assertEqual((got["cut_units"], got["most_pieces_per_unit"]),
                         (sum(n > 1 for n in pieces_of), max(pieces_of)))
        self.assertEqual(len(set(slots)), len(slots), "slots are distinct")
        self.assertEqual([(m["request"], m["head"], m["pieces"]) for m in got["merges"]],
                         [(*u[:2], n) for u, n in zip(units, pieces_of) if n > 1])
        if got["row"] == "cuda.mma":
            slot_bytes = (2 + got["head_dim"]) * 4 * got["query_tokens"] * got["heads_q"] // got["heads_kv"]
            self.assertLess(max(slots, default=-1), got["most_partials"])
            self.assertEqual(got["partial_bytes"], len(slots) * slot_bytes)
            self.assertEqual(got["most_partial_bytes"], got["most_partials"] * slot_bytes)
        self.assertEqual(sum(c["requests"] for c in got["classes"]), got["requests"])
        for c in got["classes"]:
            own = [n for n, u in zip(pieces_of, units) if c["tokens"][0] <= keys_of[u[0]] <= c["tokens"][1]]
            self.assertEqual(([min(own), max(own)], len(own), sum(n > 1 for n in own)),
                             (c["pieces_per_unit"], c["units"], c["cut_units"]))
        return got

    def test_maps(self):
        for lengths, heads in [("1x128K+31x4K", "8/1"), ("64x4K", "8/1"), ("64x0.5K", "64/8"), ("1x16K+15x64", "64/8"),
                               ("512x100", "64/8"), ("3x4K+1x100+2x0", "8/2"), ("1x1", "1/1"), ("2x0", "4/4")]:
            for args in [[], ["--sms", 78], ["--workers", 1], ["--workers", 1000], ["--row", "cuda.mma"], ["--kv-dtype", "fp8"], ["--window", 1000, "--queries", 8],
                         ["--piece-tiles", 8], ["--piece-tiles", 3, "--window", 300], ["--piece-tiles", 2**30]]:
                with self.subTest(lengths=lengths, heads=heads, args=args):
                    self.check(lengths, heads, *args)

    def test_an_h200_is_the_default(self):
        got = self.map_of("64x4K", "64/8")
        self.assertEqual(got, self.map_of("64x4K", "64/8", "--sms", 132))
        self.assertEqual(got["workers"] % 132, 0)
        self.assertEqual(self.map_of("64x4K", "64/8", "--workers", 5)["workers"], 5)

    def test_many_lengths_share_letters(self):
        letters = [c["letter"] for c in self.check("+".join(f"1x{37 * i}" for i in range(1, 300)), "8/2")["classes"]]
        self.assertEqual(letters, list("ABCDEFGH"), "1 to 173 tiles: as many powers of two")
        self.assertEqual([(c["letter"], c["tokens"]) for c in self.map_of("1x5+1x7K", "8/8")["classes"]],
                         [("A", [7168, 7168]), ("B", [5, 5])])

    def drawing(self, *args):
        text = self.ok("ops", "schedule", *args).text
        self.assertLessEqual(max(map(len, text.splitlines())), 100, args)
        self.assertLess(len(text.splitlines()), 80, args)
        return text

    def test_text_has_the_totals(self):
        batch = ["--lengths", "1x128K+31x4K", "--heads", "8/1", "--queries", 2, "--window", 100000, "--row", "cuda.mma"]
        text, got = self.drawing(*batch), self.ok("ops", "schedule", *batch, "--json", "-").json
        self.assertIn("32 requests with 8/1 heads, 2 query tokens each, window 100000\n", text)
        self.assertRegex(text, rf"imbalance +{got['imbalance']:.3f}: the heaviest worker has {got['heaviest']},")
        self.assertRegex(text, rf"time lost +{100 * got['share_waiting']:.1f} % waiting")
        self.assertRegex(text, rf"pieces +{got['pieces']}, of which {got['partials']} are parts of {got['cut_units']} cut")
        self.assertRegex(text, rf"A +131072 +1 +{got['classes'][0]['tiles_per_unit'][0]} ")
        self.assertRegex(text, r"B +4096 +31 +64 ")

    def test_workers_without_a_piece_are_not_used(self):
        batch = ["--lengths", "1x128K+31x4K", "--heads", "8/1", "--piece-tiles", 2**30]
        got = self.ok("ops", "schedule", *batch, "--json", "-").json
        self.assertEqual((got["used_workers"], got["workers"]), (32, 264))
        self.assertEqual(got["used_workers"], sum(worker["weight"] > 0 for worker in got["map"]))
        self.assertAlmostEqual(got["imbalance"], got["heaviest"] * got["used_workers"] / got["weight"])
        self.assertRegex(self.drawing(*batch), rf"workers +{got['used_workers']} of 264 have work: a piece is whole")

    def test_bars(self):
        """A line per worker: as long as its weight, with its pieces."""
        batch = ["--lengths", "1x4K+2x1K", "--heads", "8/1", "--workers", 20]
        text, got = self.drawing(*batch), self.ok("ops", "schedule", *batch, "--json", "-").json
        lines = re.findall(r"(?m)^ +(\d+) \|(.{40})\| +(\d+)  (.+)$", text)
        self.assertEqual(len(lines), got["used_workers"])
        for worker, bar, weight, pieces in lines:
            entry = got["map"][int(worker)]
            self.assertEqual(int(weight), entry["weight"])
            self.assertAlmostEqual(len(bar.rstrip()), 40 * entry["weight"] / got["heaviest"], delta=0.51)
            for piece in entry["pieces"]:
                self.assertIn(f"{piece['request']}.0[{piece['first_tile']}", pieces)
            self.assertEqual(set(bar) - set(" ."), {"abb"[piece["request"]] for piece in entry["pieces"]})
        whole = self.drawing("--lengths", "8x4K", "--heads", "8/1", "--workers", 8)
        self.assertEqual(whole.count(".AAAAA"), 8)
        self.assertIn("each a whole unit: nothing to merge", whole)

    def test_drawings_stay_short(self):
        for lengths, heads, workers, folded in [("60x4K+4x5K", "8/1", 264, False), ("512x100", "64/8", 264, True),
                                                ("64x4K", "64/8", 1056, True), ("65536x100", "8/1", 65536, True)]:
            text = self.drawing("--lengths", lengths, "--heads", heads, "--workers", workers, "--row", "cuda.mma")
            self.assertEqual(": the same\n" in text, folded, lengths)
            self.assertEqual("are not drawn" in text, workers > 1088)
        few = ["--lengths", "3x4K+1x100+2x0", "--heads", "8/2", "--workers", 264, "--row", "cuda.mma"]
        used = self.ok("ops", "schedule", *few, "--json", "-").json["used_workers"]
        self.assertIn(f"workers {used}-263 have nothing to do", self.drawing(*few))

    def test_the_largest_batches_are_quick(self):
        begin = time.monotonic()
        for lengths, heads, args in [("65536x16K", "1024/1024", ["--workers", 65536]), ("1x2147483647", "8/1", []),
                                     ("1x2147483647+65535x0", "8/1", ["--piece-tiles", 1])]:
            self.drawing("--lengths", lengths, "--heads", heads, *args)
        self.assertLess(time.monotonic() - begin, 600 if SANITIZED else 60)

    def test_what_is_too_long_to_list(self):
        run = self.ok("ops", "schedule", "--lengths", "4000x1K", "--heads", "64/64", "--piece-tiles", 3, "--json", "-")
        self.assertIn("--json: more than 131072 pieces and merges", run.err)
        self.assertNotIn("map", run.json)
        self.assertEqual(run.json["cut_units"], 64 * 4000)

    def test_json_to_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("4 requests", self.drawing("--lengths", "4x1K", "--heads", "8/2", "--json", f"{folder}/map.json"))
            with open(f"{folder}/map.json", encoding="utf-8") as file:
                self.assertEqual(json.load(file), self.map_of("4x1K", "8/2"))

    def test_values_that_do_not_fit(self):
        good = {"--lengths": "1x4K", "--heads": "8/1"}
        for flag, value, says in [
                ("--lengths", "4K", "is '4K', needs REQUESTSxTOKENS[+...], such as 64x4K or 1x16K+15x64"),
                ("--lengths", "-1x4K", "needs REQUESTSxTOKENS"),
                ("--lengths", "1x4K+", "needs REQUESTSxTOKENS"),
                ("--lengths", "", "is '', needs REQUESTSxTOKENS"),
                ("--lengths", "0x4K", "needs 1 to 65536 requests of 0 to 2147483647 tokens"),
                ("--lengths", "65536x1+1x1", "needs 1 to 65536 requests of 0 to 2147483647 tokens"),
                ("--lengths", "1x2147483648", "needs 1 to 65536 requests of 0 to 2147483647 tokens"),
                ("--lengths", "99999999999999999999x1", "needs 1 to 65536 requests"),
                ("--lengths", "1x99999999999999999999K", "needs 1 to 65536 requests"),
                ("--lengths", "65536x2147483647", "needs at most 2147483647 (2^31 - 1)"),
                ("--heads", "8", "is '8', needs Q/KV heads, 1 to 1024 each and Q a multiple of KV, such as 64/8"),
                ("--heads", "8/3", "needs Q/KV heads"),
                ("--heads", "8/0", "needs Q/KV heads"),
                ("--heads", "2048/1", "needs Q/KV heads"),
                ("--heads", "8/1/1", "needs Q/KV heads"),
                ("--queries", "9", "is '9', needs an integer from 1 to 8"),
                ("--window", "-1", "is '-1', needs an integer from 0 to 2147483647"),
                ("--sms", "0", "is '0', needs an integer from 1 to 1024"),
                ("--workers", "65537", "is '65537', needs an integer from 1 to 65536"),
                ("--row", "mma", "is 'mma', needs sm90 or cuda.mma"),
                ("--kv-dtype", "f16", "is 'f16', needs bf16 or fp8"),
                ("--piece-tiles", "x", "is 'x', needs an integer from 0 to 1073741824"),
                ("--json", "", "is '', needs a FILE")]:
            with self.subTest(flag=flag, value=value):
                words = [word for pair in {**good, flag: value}.items() for word in pair]
                self.assertIn(f"{flag} is", self.fails(2, says, "ops", "schedule", *words).err)

    def test_json_that_does_not_fit_on_the_disk(self):
        """What was written in part is gone; what is no file stays."""
        base = ["ops", "schedule", "--lengths", "8x4K", "--heads", "8/1", "--json"]
        with tempfile.TemporaryDirectory() as folder:
            run = vivace(*base, folder + "/map.json", max_file_bytes=64)
            self.assertEqual(run.code, 1, run.err)
            self.assertIn("map.json: was not written completely: File too large", run.err)
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])
            link = pathlib.Path(folder) / "link"
            link.symlink_to("/dev/full")
            self.assertIn("was not written completely: No space left", vivace(*base, link).err)
            self.assertTrue(link.is_symlink())

    def test_flags_that_do_not_fit_each_other(self):
        base = ["ops", "schedule", "--lengths", "1x4K", "--heads", "8/1"]
        self.fails(2, "--lengths is required", "ops", "schedule", "--heads", "8/1")
        self.fails(2, "--heads is required", "ops", "schedule", "--lengths", "1x4K")
        self.fails(2, "--row is sm90, needs --piece-tiles 0 (is 8), at most 64 query rows of a KV head (are 8) and 320 CTAs (are 264)", *base,
                   "--row", "sm90", "--piece-tiles", 8)
        self.assertEqual(self.map_of("1x4K", "8/1", "--piece-tiles", 8)["row"], "cuda.mma")
        self.assertEqual(self.map_of("1x4K", "128/1")["row"], "cuda.mma")
        self.assertEqual([self.map_of("1x4K", "8/1", *args)["tile_tokens"] for args in [[], ["--kv-dtype", "fp8"]]], [32, 64])
        self.fails(2, "--sms excludes --workers", *base, "--sms", 1, "--workers", 2)
        self.fails(1, "--json: /nowhere/map.json: cannot be written", *base, "--json", "/nowhere/map.json")
        long = ["ops", "schedule", "--lengths", "1x2147483647", "--heads", "1024/1024", "--piece-tiles"]
        self.fails(2, "--piece-tiles is 1, needs 512 or more for these lengths: 34359738368 pieces, where at most "
                      "67108864 fit", *long, 1)
        self.ok(*long, 512)


if __name__ == "__main__":
    main()
