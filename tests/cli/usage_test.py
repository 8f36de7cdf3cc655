"""Help, exit codes and what the program says about values that do not fit."""

import pathlib
import tempfile
import unittest

from vivace import Case, HY3, QWEN, main, vivace

COMMANDS = ["generate", "score", "tokenize", "quantize", "serve", "bench", "bench serve", "bench step", "bench ops", "ops",
            "ops explain", "ops schedule", "doctor"]
GENERATE = ["generate", "--model", HY3, "--prompt-ids", "1,2,3"]


class Help(Case):
    def test_help_teaches(self):
        top = self.ok("--help").text
        for command in ["generate", "score", "tokenize", "quantize", "serve", "bench", "ops", "doctor"]:
            self.assertIn(command, top)
        for command in COMMANDS:
            text = self.ok(*command.split(), "--help").text
            self.assertIn("Usage:", text, command)
            if command != "bench":
                self.assertIn("Example", text, command)
            self.assertLess(max(map(len, text.splitlines())), 160, command)

    def test_version(self):
        self.assertRegex(self.ok("--version").text, r"^vivace \d+\.\d+\.\d+\n$")

    def test_every_model_command_takes_the_common_options(self):
        for command in ["generate", "score", "serve", "bench serve", "ops explain"]:
            text = self.ok(*command.split(), "--help").text
            for flag in ["--device", "--dtype", "--kv-dtype", "--threads", "--deterministic", "--router-mode", "--prefer",
                         "--max-model-len", "--exact", "--max-batch", "--kv-memory", "--page-tokens", "--token-budget"]:
                self.assertIn(flag, text, command)


class UsageErrors(Case):
    def test_no_command(self):
        self.fails(2, "vivace: a command is missing, one of generate, score,")

    def test_unknown_command_and_flag(self):
        self.fails(2, "there is no command 'dance', only generate, score", "dance")
        self.fails(2, "vivace bench: there is no command 'dance', only step, ops, serve\n", "bench", "dance")
        self.fails(2, "there is no command 'dance', only schedule, explain\n", "ops", "dance")
        self.fails(2, "vivace bench: a command is missing, one of step, ops, serve\n", "bench")
        self.fails(2, "there is no option '--tempo'", *GENERATE, "--tempo", "1")
        self.fails(2, "there is no option '--tempo'", "--tempo")
        self.fails(2, "'fast' follows no option that takes it", *GENERATE, "fast")
        self.fails(2, "'fast' follows no option that takes it", "generate", "fast")

    def test_help_of_a_command_that_is_not_there(self):
        self.fails(2, "there is no command 'server'", "server", "--help")
        self.fails(2, "there is no command 'dance'", "bench", "dance", "--help")
        self.fails(2, "there is no command 'extra'", "--version", "extra")
        self.fails(2, "there is no command 'dance'", "help", "bench", "dance")

    def test_help_as_a_word(self):
        for command in ([], ["bench"], ["bench", "step"], ["ops", "schedule"]):
            self.assertEqual(self.ok("help", *command).text, self.ok(*command, "--help").text)

    def test_missing_model_and_prompt(self):
        self.fails(2, "--model is required", "generate", "--prompt", "x")
        self.fails(2, "one of --prompt, --prompt-ids and --chat is needed", "generate", "--model", HY3)
        self.fails(2, "--chat", "generate", "--model", QWEN, "--prompt", "x", "--chat", "y")

    def test_values_that_do_not_fit(self):
        wrong = {
            "--temperature": (["nan", "-1", "inf", "warm", "", "1e300"], "needs a finite number of at least 0"),
            "--max-tokens": (["-1", "0", "1.5", "many"], "needs an integer of at least 1"),
            "--top-p": (["0", "1.01", "nan"], "needs a number above 0 and at most 1"),
            "--min-p": (["-0.1", "2"], "needs a number of at least 0 and at most 1"),
            "--top-k": (["-1"], "needs an integer of at least 0"),
            "--seed": (["-1", "x"], "needs an integer of at least 0"),
            "--logprobs": (["21", "-1"], "needs an integer from 0 to 20"),
            "--repetition-penalty": (["0", "-1", "1e39"], "needs a finite number above 0"),
            "--presence-penalty": (["2.5"], "needs a number of at least -2 and at most 2"),
            "--frequency-penalty": (["-3"], "needs a number of at least -2 and at most 2"),
            "--logit-bias": (["5", "x=1", "-1=1", "3=inf"], "needs ID=BIAS"),
            "--prompt-ids": (["1,x", "1,,2", "-1", "1,2,", "4294967296"], "needs token ids"),
            "--device": (["gpu", "cuda:x"], "needs cpu, cuda or cuda:N"),
            "--dtype": (["int4", "fp8"], "needs auto, f32 or bf16"),
            "--kv-dtype": (["fp16", "q4"], "needs auto, f32, bf16 or fp8"),
            "--threads": (["0", "-2", "x", "1000000"], "needs an integer from 1 to"),
            "--stop": ([""], "needs at least one character"),
            "--router-mode": (["fast"], "needs exact or two_term"),
            "--max-model-len": (["-1"], "needs an integer of at least 0"),
            "--max-batch": (["0"], "needs an integer from 1"),
            "--token-budget": (["0"], "needs an integer from 1"),
            "--page-tokens": (["3", "0", "512"], "needs a power of two from 1 to 256"),
            "--kv-memory": (["0", "1P", "2GB", "x", "99999999999G"],
                            "needs a positive number of bytes, alone or with K, M, G or T, such as 512M or 2G"),
            "--prefer": (["linear", "nothing=cpu", "linear=tpu", "linear=reference,linear=cpu"], "--prefer"),
        }
        for flag, (values, needs) in wrong.items():
            for value in values:
                with self.subTest(flag=flag, value=value):
                    base = ["generate", "--model", HY3] if flag == "--prompt-ids" else GENERATE
                    run = self.fails(2, needs, *base, flag, value)
                    self.assertIn(flag, run.err)
                    if flag not in ("--prefer", "--prompt-ids"):  # these name the part that does not fit
                        self.assertIn(f"'{value}'", run.err)

    def test_values_that_the_request_does_not_take(self):
        self.fails(2, "--stop[1] has 5000 bytes, needs 1..4096", *GENERATE, "--stop", "a", "--stop", "b" * 5000)
        self.fails(2, "--temperature is '1e300', needs a finite number of at least 0 in fp32", "bench", "serve", "--model", HY3, "--temperature", "1e300")

    def test_numbers_beyond_64_bits(self):
        for value in ["9223372036854775808", "99999999999999999999", "-99999999999999999999"]:
            self.fails(2, f"--max-tokens is '{value}', needs an integer from 1 to 9223372036854775807", *GENERATE,
                       "--max-tokens", value)

    def test_empty_paths(self):
        for command in [["generate", "--prompt", "x"], ["doctor"], ["ops", "explain"], ["bench", "step"],
                        ["quantize", "--out", "/tmp/x", "--scheme", "block128"]]:
            self.fails(2, "--model is '', needs a PATH", *command, "--model", "")
        self.fails(2, "--out is '', needs a DIR", "quantize", "--model", HY3, "--out", "", "--scheme", "block128")
        self.fails(2, "--text-file is ''", "score", "--model", HY3, "--text-file", "", "--window", 8)

    def test_0_takes_the_context(self):
        self.ok(*GENERATE, "--max-tokens", 1, "--max-model-len", 0)

    def test_explain_has_the_limits_of_the_engine(self):
        explain = ["ops", "explain", "--model", HY3]
        self.fails(2, "--batch is 65, needs at most --max-batch = 64", *explain, "--batch", 65)
        self.ok(*explain, "--batch", 65, "--max-batch", 65)
        self.fails(2, "--token-budget is 8, needs at least --max-batch = 64", *explain, "--token-budget", 8)

    def test_options_that_do_not_fit_each_other(self):
        for command in [GENERATE, ["bench", "serve", "--model", HY3], ["ops", "explain", "--model", HY3]]:
            run = self.fails(2, "--token-budget is 512, needs at least --max-batch = 4096", *command, "--max-batch", 4096)
            self.assertIn("raise --token-budget or lower --max-batch", run.err)
            self.fails(2, "--kv-dtype is 'f32', needs auto, bf16 or fp8: --device is cuda", *command, "--device", "cuda",
                       "--kv-dtype", "f32")

    def test_a_preference_is_given_once(self):
        self.fails(2, "--prefer: linear is given twice, as 'reference' and as 'cpu'", *GENERATE, "--prefer",
                   "linear=reference,linear=cpu")

    def test_synthetic_models(self):
        for command in ["generate", "score", "bench serve", "bench step", "ops explain", "doctor"]:
            self.assertIn("synthetic:NAME[,layers=N]", self.ok(*command.split(), "--help").text, command)
        for command in [["ops", "explain"], ["bench", "step"], ["generate", "--prompt-ids", "1"]]:
            self.fails(2, "--model is 'synthetic:hy3', needs --device cuda: ", *command, "--model", "synthetic:hy3")
            command = [*command, "--device", "cuda", "--model"]
            self.fails(2, "there is no synthetic model 'gpt'; there are hy3, ", *command, "synthetic:gpt")
            self.fails(2, "'layers=0' needs layers=N with N from 1 to 32", *command, "synthetic:llama3-8b,layers=0")
            self.fails(2, "'layers' is given twice", *command, "synthetic:hy3,layers=2,layers=3")
        self.fails(1, "random weights come without one; tokenize needs a model from files", "tokenize", "--model",
                   "synthetic:hy3", "--text", "x")

    def test_help_has_the_limits(self):
        text = self.ok("bench", "serve", "--help").text
        for limit in ["--max-batch 1..4096", "--token-budget 1..1048576", "--requests 1..1000000", "at least --max-batch"]:
            self.assertIn(limit, text)

    def test_help_says_what_else_a_command_writes_and_refuses(self):
        text = self.ok("score", "--help").text
        for words in ["The file must not exist;\n", "a model without routers is refused\n"]:
            self.assertIn(words, text)
        self.assertIn("between lines of plain text", self.ok("serve", "--help").text)

    def test_dtype_is_what_the_device_computes_in(self):
        self.ok(*GENERATE, "--dtype", "f32", "--max-tokens", 1)
        self.fails(2, "--dtype is 'bf16', needs auto or f32", *GENERATE, "--dtype", "bf16")
        self.fails(2, "--dtype is 'f32', needs auto or bf16", *GENERATE, "--dtype", "f32", "--device", "cuda:1")

    def test_a_flag_is_given_once(self):
        self.fails(2, "--model is given 2 times, needs one value", *GENERATE, "--model", QWEN)

    def test_a_flag_is_named_once(self):
        for flag, value in [("--stop", ""), ("--logit-bias", "5"), ("--threads", "0"), ("--top-p", "2")]:
            self.assertEqual(vivace(*GENERATE, flag, value).err.split("\n")[0].count(flag), 1, flag)

    def test_values_of_repeated_flags(self):
        run = self.ok(*GENERATE, "--max-tokens", 2, "--stop", "{}", "--stop", "[]", "--logit-bias", "5=1", "--logit-bias",
                      "6=-1.5", "--json")
        self.assertEqual(len(run.json["ids"]), 2)

    def test_threads_are_bounded_by_the_cores(self):
        cores = self.ok("doctor", "--json").json["cores"]
        run = self.fails(2, f"needs an integer from 1 to {4 * cores}", *GENERATE, "--threads", 4 * cores + 1)
        self.assertIn(f"4 for each of the {cores} core", run.err)
        self.ok(*GENERATE, "--max-tokens", 1, "--threads", 4 * cores)

    def test_bench_and_score_values(self):
        bench = ["bench", "serve", "--model", HY3]
        self.fails(2, "needs uniform, mixed or multi-turn", *bench, "--workload", "bursty")
        self.fails(2, "needs an integer from 1", *bench, "--requests", "0")
        for rate in ("0", "1e-300"):  # whose first request would come when clocks have ended
            self.fails(2, f"--rate is '{rate}', needs a number of at least 0.001 and at most 1000000", *bench, "--rate", rate)
        self.fails(2, "--concurrency", *bench, "--rate", "1", "--concurrency", "2")
        score = ["score", "--model", HY3, "--text-file", HY3 / "config.json"]
        self.fails(2, "--window", *score)
        self.fails(2, "needs an integer of at least 2", *score, "--window", "1")

    def test_serve_values(self):
        serve = ["serve", "--model", HY3]
        self.fails(2, "--port is '65536', needs an integer from 0 to 65535", *serve, "--port", "65536")
        self.fails(2, "--max-body is '65M', needs 1024..67108864 bytes", *serve, "--max-body", "65M")
        self.fails(2, "--write-timeout is '0'", *serve, "--write-timeout", "0")
        self.fails(2, "--log is 'some', needs all, errors or off", *serve, "--log", "some")
        self.fails(1, "--api-key-file '/nowhere': cannot be read", *serve, "--api-key-file", "/nowhere")
        self.fails(1, "--chat-template '/nowhere': cannot be read", *serve, "--chat-template", "/nowhere")
        self.fails(2, "--host is 'nobody', needs an IP address", *serve, "--host", "nobody")
        self.fails(2, "--host is '', needs an ADDRESS", *serve, "--host", "")

    def test_files_of_serve_with_nothing_in_them(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "file")
            for text in ["", " \r\n\t\n"]:
                file.write_text(text)
                for flag, needs in [("--chat-template", "has nothing in it, needs a Jinja template"), ("--api-key-file", "has no key")]:
                    self.fails(1, f"{flag} '{file}' {needs}", "serve", "--model", HY3, "--port", 0, flag, file)


class Failures(Case):
    def test_model_that_is_not_there(self):
        for command in [["generate", "--prompt", "x"], ["tokenize", "--text", "x"], ["bench", "serve"],
                        ["ops", "explain"], ["doctor"], ["score", "--text-file", "x", "--window", "8"]]:
            run = self.fails(1, "/nowhere/model.gguf", *command, "--model", "/nowhere/model.gguf")
            self.assertIn("a .gguf file, or a folder with config.json, safetensors and tokenizer.json", run.err)

    def test_folder_without_config(self):
        run = self.fails(1, "config.json", "generate", "--model", HY3.parent, "--prompt", "x")
        self.assertIn("a .gguf file, or a folder with", run.err)

    def test_one_file_of_a_model(self):
        for name in ["config.json", "tokenizer.json", "model.safetensors"]:
            for command in [["generate", "--prompt", "x"], ["doctor"], ["tokenize", "--text", "x"],
                            ["quantize", "--out", "/tmp/x", "--scheme", "block128"]]:
                self.fails(1, f"{QWEN / name}: is one file of a model; give the folder, {QWEN}\n", *command, "--model", QWEN / name)

    def test_file_that_is_no_model(self):
        run = vivace("generate", "--model", QWEN / "sample.txt", "--prompt", "x")
        self.assertEqual(run.code, 1)
        self.assertIn("sample.txt", run.err)

    def test_model_without_tokenizer(self):
        self.fails(1, "no tokenizer", "generate", "--model", HY3, "--prompt", "x")
        self.fails(1, "no tokenizer", "tokenize", "--model", HY3, "--text", "x")

    def test_model_without_chat_template(self):
        self.fails(1, "no chat template", "generate", "--model", QWEN, "--chat", "x")

    def test_the_engine_names_flags(self):
        for flags, says in [(["--max-model-len", "99999999"], "--max-model-len is 99999999, needs at most"),
                            (["--kv-memory", "1"], "--kv-memory is 1, needs at least"),
                            (["--max-model-len", "16", "--max-tokens", "15"],
                             "--prompt-ids has 3 tokens and --max-tokens is 15: the context holds 16"),
                            (["--logit-bias", "512=1"], "--logit-bias names token 512, needs a token id of 0..511"),
                            (["--device", "cuda"], "--device is 'cuda'")]:
            run = self.fails(1 if flags[0] == "--device" else 2, says, *GENERATE, *flags)  # no value of a flag is wrong without a GPU
            self.assertNotRegex(run.err, r"[a-z]_[a-z]")

    def test_id_outside_the_vocabulary(self):
        self.fails(2, "--prompt-ids[1] is 999999", "generate", "--model", HY3, "--prompt-ids", "1,999999")

    def test_the_prompt_is_called_what_it_was_given_as(self):
        short = ["--max-model-len", 8, "--max-tokens", 8]
        self.fails(2, "--prompt-ids has 1 token and ", "generate", "--model", HY3, "--prompt-ids", "1", *short)
        self.fails(2, "--prompt has ", "generate", "--model", QWEN, "--prompt", "one two", *short)

    def test_no_gpu_and_no_way_around_that_is_none(self):
        if self.ok("doctor", "--json").json["cuda"]["devices"]:
            self.skipTest("this machine has a GPU")
        self.fails(1, "models from files run with --device cpu too", *GENERATE, "--device", "cuda")
        self.assertNotIn("--device cpu", self.fails(1, "--device is 'cuda'", "bench", "ops", "--suite", "roof").err)

    def test_control_bytes_are_shown(self):
        with tempfile.TemporaryDirectory() as folder:
            ids = pathlib.Path(folder, "ids")
            ids.write_bytes(b"1 2\x00\x1b[31m 3")
            run = self.fails(1, r"id 1 is '2\x00\x1b', needs 0 to 511", "quantize", "--model", HY3, "--out", f"{folder}/out",
                             "--scheme", "per-tensor", "--calibration-ids", ids)
            self.assertTrue(run.err.endswith("\n"))
        self.fails(2, r"there is no command '\x1b[31mred'", "\x1b[31mred")

    def test_prompt_beyond_the_context(self):
        run = self.fails(2, "16", *GENERATE, "--max-model-len", "16", "--max-tokens", "14")
        self.assertIn("14", run.err)

    def test_preferred_row_that_does_not_fit(self):
        self.fails(1, "cuda", *GENERATE, "--device", "cuda")


if __name__ == "__main__":
    main()
