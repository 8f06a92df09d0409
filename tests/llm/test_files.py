#!/usr/bin/env python3
"""The files that build/llm reads and writes: what is in a model's folder is a regular file, of a
size that its kind has, or refused at once; texts may come from pipes; what cannot be written is an
error that leaves no part behind."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
import test_llm
from scripts import check, run_tests

SCRIPT_LIMIT = 200  # seconds, for tests/run.sh
EACH = 15           # of one run
BERT = os.path.join(TOP, "examples", "llm", "tiny", "bert")
IDS = ("--ids", "1 2 3", "--print-ids", "--max-new", "3")
JSON_MAX, TOKENIZER_MAX, INDEX_MAX = 1 << 24, 1 << 28, 100000000  # files.h, tshard.h


def bounded():
    """A process that reads without end is stopped early."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))


def llm(model, *flags, **how):
    """Runs it on two ranks."""
    test_llm.need_llm()
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
           "timeout": EACH, "encoding": "utf-8", "errors": "replace", **how}
    return subprocess.run([test_llm.LLM, "--model", model, "--tp", "2", *flags], **how)


def refused(done, *words):
    check(done.returncode == 1 and done.stderr.count("\n") == 1 and
          all(word in done.stderr for word in words), "wants", words, "not", done.returncode,
          done.stdout, done.stderr)


def encoder(folder):
    """A copy of the small encoder, and the flags that read all its files."""
    here = os.path.join(folder, "bert")
    if not os.path.exists(here):
        shutil.copytree(BERT, here)
        os.makedirs(os.path.join(here, "1_Pooling"))
        with open(os.path.join(here, "modules.json"), "w", encoding="ascii") as file:
            json.dump([{"idx": i, "name": str(i), "path": path,
                        "type": "sentence_transformers.models." + kind}
                       for i, (path, kind) in enumerate((("", "Transformer"),
                                                         ("1_Pooling", "Pooling")))], file)
        with open(os.path.join(here, "config.json"), encoding="ascii") as file:
            width = json.load(file)["hidden_size"]
        with open(os.path.join(here, "1_Pooling", "config.json"), "w", encoding="ascii") as file:
            json.dump({"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}, file)
    lines = os.path.join(folder, "lines")
    with open(lines, "w", encoding="ascii") as file:
        file.write("Rain and thunder!\n")
    return here, ("--embed", lines)


def with_a_tokenizer(folder):
    """A decoder whose folder has a tokenizer."""
    return test_llm.Letters(os.path.join(folder, "letters")).folder


def replaced(path, kind, size):
    """Puts a FIFO, a link to a device, or too large a file in a file's place."""
    if os.path.exists(path):
        os.rename(path, path + ".before")
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        os.symlink("/dev/zero", path)
    else:
        with open(path, "wb") as file:
            file.truncate(size + 1)


def restored(path):
    os.remove(path)
    if os.path.exists(path + ".before"):
        os.rename(path + ".before", path)


def what_is_no_file_in_a_folder_is_refused(folder):
    letters, (bert, embed) = with_a_tokenizer(folder), encoder(folder)
    index = "model.safetensors.index.json"
    for model, name, size, flags in (
            (letters, "config.json", JSON_MAX, IDS),
            (letters, "generation_config.json", JSON_MAX, IDS),
            (letters, "model.safetensors", None, IDS),
            (letters, index, INDEX_MAX, IDS),
            (letters, "tokenizer.json", TOKENIZER_MAX, ("--prompt", "abc")),
            (letters, "tokenizer_config.json", JSON_MAX, ("--chat",)),
            (letters, "chat_template.jinja", JSON_MAX, ("--chat",)),
            (bert, "1_Pooling/config.json", JSON_MAX, embed),
            (bert, "modules.json", JSON_MAX, embed)):
        path = os.path.join(model, name)
        if name == index:
            os.rename(os.path.join(model, "model.safetensors"), os.path.join(folder, "weights"))
        for kind in ("a FIFO", "a device", "bytes")[:2 if size is None else 3]:
            replaced(path, kind, size)
            refused(llm(model, *flags, preexec_fn=bounded), os.path.basename(path), kind)
            restored(path)
        if name == index:
            os.rename(os.path.join(folder, "weights"), os.path.join(model, "model.safetensors"))


def what_is_no_file_is_no_tokenizer_and_no_model(folder):
    path = os.path.join(folder, "fifo")
    os.mkfifo(path)
    done = llm(with_a_tokenizer(folder), "--tokenizer", path, "--tokenize")
    refused(done, "fifo is a FIFO, not a regular file")
    refused(llm(path, *IDS), "fifo/config.json")
    refused(llm(os.path.dirname(path), *IDS), "config.json", "No such file")


def texts_come_from_pipes(folder):
    here, (flag, lines) = encoder(folder)
    want = llm(here, flag, lines)
    check(want.returncode == 0 and want.stdout, want.stderr)
    with open(lines, encoding="ascii") as file:
        text = file.read()
    fifo = os.path.join(folder, "fifo")
    os.mkfifo(fifo)

    def write():
        with open(fifo, "w", encoding="ascii") as file:
            file.write(text)

    writer = threading.Thread(target=write)
    writer.start()
    done = llm(here, flag, fifo)
    writer.join()
    check(done.stdout == want.stdout, "a FIFO:", done.stderr)
    done = llm(here, flag, "/dev/stdin", input=text, stdin=None)
    check(done.stdout == want.stdout, "stdin:", done.stderr)


def limited():
    """Beyond it a write raises SIGXFSZ, which Python has ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))


def logits_are_whole_or_not_there(folder):
    model = with_a_tokenizer(folder)
    dump = os.path.join(folder, "logits")
    done = llm(model, *IDS, "--dump-logits", dump, preexec_fn=limited)
    refused(done, "logits\" cannot be written", "files of this process may have 200")
    check(not os.path.exists(dump), "a part of the logits")
    check(llm(model, *IDS, "--dump-logits", dump).returncode == 0)
    with open(dump, "rb") as file:
        before = file.read()
    refused(llm(model, "--ids", "4 5 6 7", "--print-ids", "--dump-logits", dump,
                preexec_fn=limited), "logits\" cannot be written")
    with open(dump, "rb") as file:
        check(file.read() == before, "the old logits have changed")
    check([name for name in os.listdir(folder) if name.startswith("logits")] == ["logits"])
    refused(llm(model, *IDS, "--dump-logits", "/dev/full"), "/dev/full\" cannot be written",
            "No space left")


def lost_output_is_an_error(folder):
    """stdout is a full device, closed, or a file with a limit; stderr has one sentence."""
    model, (bert, embed) = with_a_tokenizer(folder), encoder(folder)
    for kind, how in (("No space left", lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)),
                      ("Bad file", lambda: os.close(1))):
        for where, flags in ((model, IDS), (model, ("--prompt", "abc", "--max-new", "4")),
                             (model, ("--ids", "1 2", "--ids", "3", "--print-ids")),
                             (model, ("--tokenize",)), (model, ("--detokenize",)),
                             (model, ("--help",)), (bert, embed)):
            done = llm(where, *flags, input="1 2" if "--detokenize" in flags else "a", stdin=None,
                       stdout=None, preexec_fn=how)
            check(done.returncode == 1 and "llm: stdout cannot be written" in done.stderr, kind,
                  flags, done.returncode, done.stderr)
            check(kind in done.stderr or "--ids" in flags or "--prompt" in flags, done.stderr)
    dump = os.path.join(folder, "logits")
    want = llm(model, *IDS, "--dump-logits", dump)
    check(want.returncode == 0, want.stderr)
    with open(dump, "rb") as file:
        before = file.read()
    llm(model, *IDS, "--dump-logits", dump, stdout=None, preexec_fn=lambda: os.closerange(0, 3))
    with open(dump, "rb") as file:
        check(file.read() == before, "what is printed goes into a file")

    with open(dump, "wb") as file:
        done = llm(bert, *embed, stdout=file, preexec_fn=limited)
    check(done.returncode == 1 and "stdout cannot be written: File too large" in done.stderr,
          done.returncode, done.stderr)


def a_line_may_hold_any_byte(folder):
    """A NUL, which BERT's normalizer drops, ends neither the line nor the file."""
    here, (flag, lines) = encoder(folder)
    vectors = []
    for text in (b"Rain and thunder!\nA cold day.\n", b"Rain\0 and thunder!\nA \0cold day."):
        with open(lines, "wb") as file:
            file.write(text)
        done = llm(here, flag, lines)
        check(done.returncode == 0 and done.stdout.count("\n") == 2, done.stdout, done.stderr)
        vectors.append(done.stdout)
    check(vectors[0] == vectors[1], "a NUL changes the vectors")


if __name__ == "__main__":
    sys.exit(run_tests("llm files", [
        what_is_no_file_in_a_folder_is_refused, what_is_no_file_is_no_tokenizer_and_no_model,
        texts_come_from_pipes, logits_are_whole_or_not_there, lost_output_is_an_error,
        a_line_may_hold_any_byte]) > 0)
