/* llm.c - runs a language model from the Hugging Face hub, tensor-parallel on threads, or on
 * processes over TCP
 *
 *   build/llm --model DIR --prompt "Once upon a time"     continues a text; --temperature 1 samples
 *   build/llm --model DIR --chat                          a conversation
 *   build/llm --model DIR --ids "1 2 3" --print-ids       continues these tokens
 *   build/llm --model DIR --ids "1 2 3" --dump-logits F   also writes their logits to F
 *   build/llm --model DIR --tokenize <FILE                writes a text as tokens
 *   build/llm --model FILE.gguf ...                       the same with a GGUF file
 *   build/llm --model DIR --finetune FILE --out DIR2      trains it on a text or on conversations
 *   build/llm --help                                      lists the flags
 *
 * README.md beside this file lists the models. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* for sysconf, sigaction and getline */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef LLM_TCP
#include "../../backends/tshard_uv.h"
#endif
#include "../balance.h"
#include "../cores.h"
#include "../output.h"
#include "chat.h"
#include "model.h"
#include "text.h"

#include "embed.h"

#include "finetune.h"
#include "plan.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    LLM_CHUNK = 256,    /* prompt tokens per forward, all texts together; but 16 or more of each */
    LLM_CONTEXT = 4096, /* default of --context, if the model takes so many tokens */
    LLM_NEW = 64,       /* default of --max-new */
    LLM_ANSWER = 512,   /* default of --max-new with --chat */
    LLM_FLAGS = 80      /* length of arrays of flags, at least the number of flags */
};
#define LLM_FOREVER (INT64_C(1) << 61) /* a timeout in ns that never ends */

/* The flags, and what is read before the ranks start. All ranks of this process share it, and only
 * read it, but for the error. */
typedef struct llm_job {
    const char *model, *dump, *backend, *dtype, *weights; /* values of flags; NULL: not given */
    const char *tokenizer_file, *pre, *embed, *system, *template_name, *cache, *balance, *wire;
    text_list prompt_texts, ids, stops, ignored; /* values of --prompt, --ids, --stop, --ignore */
    int64_t tp, max_new, threads, context; /* max_new -1, others 0: not given */
    int terminal; /* --chat: 1: on a terminal, with threads of this process as ranks */
    int plan, allow_unknown_keys, chat, print_ids, greedy, ignore_eos;
    int tokenize, detokenize, no_special;
    int64_t top_k, seed;
    double temperature, top_p, min_p, penalty; /* 0: not given; TSH_ZERO: a temperature of 0 */
    text_codec codec;
    chat_format format; /* --chat: the chat template */
    tune_job tune;       /* --finetune, --evaluate, --adapter */
    llm_config config;
    const llm_family *family;
    int32_t *tokens;     /* tokens of all prompts, or of all lines of --embed, in order */
    int64_t *ends, rows; /* ends[i]: index in tokens where text i ends; rows: number of texts */
    int64_t room;        /* most tokens that a text may have, generated ones included */
    embed_model vectors; /* --embed: makes a vector of each text; only rank 0 reads it */
    tsh_comm comm;       /* with TCP: connects this process to the other ranks */
    /* 1: comm is open, and run_texts closes it on failure; 0: it is not open, or a ctx closes it */
    int joined;
    pthread_mutex_t lock;         /* guards error */
    char error[TSH_MESSAGE_SIZE]; /* the first error of any rank; "": none */
} llm_job;

/* -- parsing flags ---------------------------------------------------------- */

/* A flag of the command line. Its value is written to the one of text, list, number, on and real
 * that is not NULL. */
typedef struct llm_flag_row {
    const char *name, *help;
    const char **text;
    text_list *list; /* gets the values of a flag that may be given several times */
    int64_t *number;
    int *on;
    double *real;
    int zero; /* 1: the value may be 0, which is stored as TSH_ZERO in *real; 0: it is above 0 */
} llm_flag_row;

static void print_flags(const llm_flag_row *flags, int n, FILE *file) {
    fprintf(file, "usage: llm --model DIR --prompt \"Once upon a time\" ...\n");
    for (int i = 0; i < n; i++)
        fprintf(file, "  --%s%-*s %s\n", flags[i].name, 19 - (int)strlen(flags[i].name),
                flags[i].text || flags[i].list ? " TEXT"
                : flags[i].number              ? " N"
                : flags[i].real                ? " X"
                                               : "",
                flags[i].help);
}

/* Prints an error in the command line to stderr. Returns 2, the exit code. */
TSH_PRINTF(1, 2)
static int usage(const char *format, ...) {
    va_list list;
    fprintf(stderr, "llm: ");
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, "; llm --help lists the flags\n");
    return 2;
}

/* Stores the value of a flag, the next argument, or NULL if there is none. Returns 0, or 2 after a
 * mistake. */
static int parse_flag(const llm_flag_row *flag, const char *value) {
    char *end;
    if (flag->on) {
        *flag->on = 1;
        return 0;
    }
    if (!value) return usage("--%s needs a value", flag->name);
    if (flag->list && !text_append(flag->list, value)) return usage("not enough memory");
    if (flag->text) *flag->text = value;
    if (flag->text || flag->list) return 0;
    errno = 0;
    if (flag->real) {
        *flag->real = strtod(value, &end);
        if (flag->zero && end != value && *flag->real == 0) *flag->real = TSH_ZERO;
        else if (!(*flag->real > 0)) errno = ERANGE;
        if (*end || end == value || errno || *flag->real > 1e6)
            return usage("--%s takes a number %s 0, not '%s'", flag->name,
                         flag->zero ? "from" : "above", value);
        return 0;
    }
    const long long number = strtoll(value, &end, 10);
    if (*end || end == value || errno || number < !flag->zero || number > 1000000000)
        return usage("--%s takes a whole number %s 0, not '%s'", flag->name,
                     flag->zero ? "from" : "above", value);
    *flag->number = number;
    return 0;
}

/* Writes the flags of finetune.h to `flags`. Returns their number. */
static int list_tune_flags(tune_settings *tune, llm_flag_row *flags) {
    const llm_flag_row list[] = {
        {"finetune", "train on this text, or on its lines of JSON", .text = &tune->finetune},
        {"out", "finetune: the folder for the adapter or model", .text = &tune->out},
        {"lora", "finetune: adapters of this rank, not all weights", .number = &tune->lora},
        {"alpha", "lora: s is X / rank (twice the rank)", .real = &tune->alpha},
        {"lora-dropout", "lora: probability of a zero in its input (0)", .real = &tune->dropout,
         .zero = 1},
        {"targets", "lora: layers, as q_proj,v_proj; else all linear ones", .text = &tune->targets},
        {"steps", "finetune: steps of the optimiser; else --epochs", .number = &tune->steps},
        {"epochs", "finetune: how often each document is learnt (1)", .number = &tune->epochs},
        {"batch", "finetune: rows in a step (8)", .number = &tune->batch},
        {"accumulate", "finetune: micro-batches that a step is split into",
         .number = &tune->accumulate},
        {"lr", "finetune: learning rate at its highest (2e-4 with --lora, else 2e-5)",
         .real = &tune->lr},
        {"warmup", "finetune: steps until then (a tenth, at most 100)", .number = &tune->warmup,
         .zero = 1},
        {"weight-decay", "finetune: of matrices (0)", .real = &tune->decay, .zero = 1},
        {"clip", "finetune: largest norm of the gradients (1); 0: any", .real = &tune->clip,
         .zero = 1},
        {"dpo", "finetune, preferences: beta of DPO (0.1)", .real = &tune->beta},
        {"all-tokens", "finetune: learn prompts, too", .on = &tune->all_tokens},
        {"no-packing", "finetune: one document in a row", .on = &tune->unpacked},
        {"truncate", "finetune: cut what is longer than --context", .on = &tune->truncate},
        {"held-out", "finetune: file to evaluate on; else a tenth", .text = &tune->held_out},
        {"eval-every", "finetune: steps between evaluations", .number = &tune->eval_every},
        {"save-every", "finetune: steps between saves of the run's state",
         .number = &tune->save_every},
        {"resume", "finetune: go on from that state", .on = &tune->resume},
        {"recompute", "finetune: compute blocks again in backward, for less memory",
         .on = &tune->recompute},
        {"dp", "finetune, evaluate: copies of the model, which share the rows; else chosen",
         .number = &tune->dp},
        {"pp", "finetune, evaluate: stages, which share the layers", .number = &tune->pp},
        {"zero", "finetune: cut the optimiser's moments over the copies", .on = &tune->zero},
        {"evaluate", "loss, perplexity and accuracy on this file", .text = &tune->evaluate},
        {"stride", "evaluate: tokens between two windows of a text (half of --context)",
         .number = &tune->stride},
        {"adapter", "compute with the adapter in this folder, of PEFT or of --lora",
         .text = &tune->adapter},
        {"merge", "write the adapter into the weights; with --out into a model",
         .on = &tune->merge}};
    memcpy(flags, list, sizeof list);
    return (int)(sizeof list / sizeof *list);
}

/* Writes all flags to `flags`. Returns their number. help: set by --help. */
static int list_flags(llm_job *job, int *help, llm_flag_row flags[LLM_FLAGS]) {
    const llm_flag_row list[] = {
        {"model", "the folder of a model, or a GGUF file", .text = &job->model},
        {"prompt", "the text to continue; several times: several texts",
         .list = &job->prompt_texts},
        {"ids", "the same as numbers of tokens", .list = &job->ids},
        {"chat", "answer the lines of stdin", .on = &job->chat},
        {"system", "chat: what the model is to be", .text = &job->system},
        {"template", "chat: how it is written; else as the model says",
         .text = &job->template_name},
        {"context", "tokens in a row of --finetune (1024); of --chat (4096)",
         .number = &job->context},
        {"max-new", "how many tokens to generate (64; chat: 512)", .number = &job->max_new,
         .zero = 1},
        {"stop", "end before this text; several times: any of them", .list = &job->stops},
        {"ignore-eos", "go on after the end of the text", .on = &job->ignore_eos},
        {"greedy", "take the most likely token (the default but for --chat)", .on = &job->greedy},
        {"temperature", "sample: divides the logits; 0: as --greedy (chat: 0.7)",
         .real = &job->temperature, .zero = 1},
        {"top-k", "sample: of the N most likely tokens", .number = &job->top_k},
        {"top-p", "sample: of the most likely ones whose sum is X (chat: 0.9)",
         .real = &job->top_p},
        {"min-p", "sample: of those with X times the largest probability", .real = &job->min_p},
        {"repetition-penalty", "divides the logits of tokens that were", .real = &job->penalty},
        {"seed", "of drawn tokens; finetune: of adapters, dropout and order",
         .number = &job->seed, .zero = 1},
        {"print-ids", "print tokens as numbers", .on = &job->print_ids},
        {"raw", "print control characters of generated text, too", .on = &job->codec.raw},
        {"dump-logits", "write the logits of the prompt to this file", .text = &job->dump},
        {"tp", "ranks, as threads; else chosen for the cores", .number = &job->tp},
        {"threads", "threads of each rank; else chosen with the ranks", .number = &job->threads},
        {"backend", "threads, or tcp: a process per rank, by tshard-run", .text = &job->backend},
        {"cache", "tcp: keeps what rank 0 sends of the model in this folder", .text = &job->cache},
        {"balance", "shares of the ranks of --tp, such as 2,1; auto: measured",
         .text = &job->balance},
        {"wire", "bf16, q8_0 or q4_0: activations are sent in it to other ranks",
         .text = &job->wire},
        {"dtype", "f32, bf16 or f16 of all weights; else what the model says", .text = &job->dtype},
        {"weights", "q8_0, q4_0 or q4_1: of 8 or 4 bits", .text = &job->weights},
        {"embed", "write a vector for each line of this file", .text = &job->embed},
        {"tokenize", "write the text on stdin as one line of tokens", .on = &job->tokenize},
        {"detokenize", "write the tokens on stdin as text", .on = &job->detokenize},
        {"no-special", "without tokens that begin or end a text", .on = &job->no_special},
        {"tokenizer", "a tokenizer.json or GGUF file; else the model's",
         .text = &job->tokenizer_file},
        {"ignore", "pass over the model's tensors with names as this pattern",
         .list = &job->ignored},
        {"allow-unknown-keys", "pass over keys of config.json", .on = &job->allow_unknown_keys},
        {"plan", "print the memory that a run would take, by a dry one", .on = &job->plan},
        {"pre", "GGUF: how texts are split, in place of tokenizer.ggml.pre", .text = &job->pre},
        {"help", "this list", .on = help}};
    const int n = (int)(sizeof list / sizeof *list);
    memcpy(flags, list, sizeof list);
    return n + list_tune_flags(&job->tune.set, flags + n);
}

/* Parses the command line. Returns 0, 2 after a mistake, or -1 after --help, which it has
 * printed. */
static int parse(llm_job *job, int argc, char **argv) {
    int help = 0;
    llm_flag_row flags[LLM_FLAGS];
    const int n = list_flags(job, &help, flags);
    for (int i = 1; i < argc; i++) {
        int k = 0;
        while (k < n && (strncmp(argv[i], "--", 2) != 0 || strcmp(argv[i] + 2, flags[k].name) != 0))
            k++;
        if (k == n) return usage("%s is no flag", argv[i]);
        if (parse_flag(&flags[k], i + 1 < argc ? argv[i + 1] : NULL) != 0) return 2;
        i += flags[k].on == NULL;
    }
    if (help) print_flags(flags, n, stdout);
    return help ? -1 : 0;
}

/* Checks flags whose value is a name, and --stop. Returns 0, or 2 after a mistake. */
static int check_names(const llm_job *job) {
    const tsh_dtype weights = job->weights ? llm_dtype_named(job->weights) : TSH_Q8_0;
    const tsh_dtype dtype = job->dtype ? llm_dtype_named(job->dtype) : TSH_F32;
    const tsh_dtype wire = job->wire ? llm_dtype_named(job->wire) : TSH_BF16;
    if (weights != TSH_Q8_0 && weights != TSH_Q4_0 && weights != TSH_Q4_1)
        return usage("--weights is q8_0, q4_0 or q4_1, not '%s'", job->weights);
    if (dtype != TSH_F32 && dtype != TSH_BF16 && dtype != TSH_F16)
        return usage("--dtype is f32, bf16 or f16, not '%s'", job->dtype);
    if (wire != TSH_BF16 && wire != TSH_Q8_0 && wire != TSH_Q4_0)
        return usage("--wire is bf16, q8_0 or q4_0, not '%s'", job->wire);
    if (strcmp(job->backend, "threads") != 0 && strcmp(job->backend, "tcp") != 0)
        return usage("--backend is threads or tcp, not '%s'", job->backend);
    if (job->cache && strcmp(job->backend, "tcp") != 0)
        return usage("--cache is for --backend tcp, where rank 0 sends the model");
    if (job->balance && strcmp(job->balance, "auto") == 0 && strcmp(job->backend, "tcp") != 0)
        return usage("--balance auto is for --backend tcp; give shares, such as 2,1");
    if (job->balance && job->plan) return usage("--plan counts equal shares; leave --balance out");
    for (size_t i = 0; i < job->stops.count; i++)
        if (!job->stops.at[i][0]) return usage("--stop needs a text that is not empty");
    return 0;
}

/* Returns 1 if tune_run of finetune.h does the run: it trains, evaluates, or merges an adapter. */
static int tunes_model(const llm_job *job) {
    const tune_settings *s = &job->tune.set;
    return s->finetune || s->evaluate || (s->adapter && s->merge && s->out);
}

/* Refuses flags that do not go together. Returns 0, or 2 after a mistake. */
static int check_flags(const llm_job *job) {
    const int converts = job->tokenize || job->detokenize;
    const int texts = job->prompt_texts.count > 0, ids = job->ids.count > 0;
    const int tunes = tunes_model(job);
    const char *why = tune_check_set(&job->tune.set);
    if (job->plan) return job->model ? check_names(job) : usage("--model is missing");
    if (!job->model && !(converts && job->tokenizer_file)) return usage("--model is missing");
    if (job->tokenize && job->detokenize) return usage("--tokenize and --detokenize are two runs");
    if (why) return usage("%s", why);
    if (!converts && texts + ids + job->chat + (job->embed != NULL) + tunes != 1)
        return usage("give one of --prompt, --ids, --chat, --embed, --finetune and --evaluate");
    if (!job->chat && (job->system || (!tunes && (job->template_name || job->context))))
        return usage("--system is for --chat, --template and --context for --chat, --finetune and "
                     "--evaluate");
    if (job->embed && job->tune.set.adapter) return usage("--adapter is not for --embed");
    if (!tunes && (job->tune.set.dp || job->tune.set.batch))
        return usage("--dp and --batch are for --finetune and --evaluate");
    if (!tunes && job->tune.set.pp)
        return usage("--pp is for --finetune and --evaluate; share the layers by --tp to generate");
    if (job->dump && job->prompt_texts.count + job->ids.count != 1)
        return usage("--dump-logits takes one prompt");
    if (job->ignored.count > LLM_IGNORE_MAX)
        return usage("--ignore is given at most %d times", LLM_IGNORE_MAX);
    return check_names(job);
}

/* -- Ctrl-C in a conversation ------------------------------------------------ */

/* 1: Ctrl-C was pressed since the prompt for a question was last printed */
static volatile sig_atomic_t interrupted;

/* Handler of Ctrl-C: the first ends an answer, or the prompt; a second one, before the next
 * question is asked for, ends the program. */
static void interrupt(int number) {
    if (interrupted) {
        (void)signal(number, SIG_DFL);
        (void)raise(number);
    }
    interrupted = 1;
}

static void catch_interrupts(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = interrupt;
    action.sa_flags = SA_RESTART;
    (void)sigaction(SIGINT, &action, NULL);
}

/* Waits for a line on stdin, a terminal. Returns 0 if Ctrl-C was pressed first. */
static int wait_for_line(void) {
    struct pollfd in = {STDIN_FILENO, POLLIN, 0};
    /* polls, since the signal of Ctrl-C may go to any thread and not end a wait in this one */
    while (!interrupted && poll(&in, 1, 100) <= 0) {}
    return !interrupted;
}

/* -- recording errors ------------------------------------------------------- */

/* Sets job->error, unless it has an earlier error; any rank may call it. Returns 1. */
TSH_PRINTF(2, 3)
static int refuse(llm_job *job, const char *format, ...) {
    va_list list;
    pthread_mutex_lock(&job->lock);
    va_start(list, format);
    if (!job->error[0]) tsh_text_format(job->error, sizeof job->error, format, list);
    va_end(list);
    (void)quote_message(job->error);
    pthread_mutex_unlock(&job->lock);
    return 1;
}

/* The logger of the library: records an error in the job, prints a warning to stderr. */
static void heed(const char *message, void *user) {
    const char *warning = strstr(message, "warning: ");
    /* where the message gives advice for C programs, which is replaced by advice on --ignore; NULL:
     * it gives none */
    const char *unknown = strstr(message, "; .ignore takes names of tensors");
    if (warning) fprintf(stderr, "llm: %s\n", message);
    else if (unknown) refuse((llm_job *)user, "%.*s; --ignore PATTERN passes over tensors that "
                             "change nothing", (int)(unknown - message), message);
    else refuse((llm_job *)user, "%s", message);
}

/* -- reading prompts --------------------------------------------------------- */

/* Reads all of stdin, and appends a 0 byte. Returns NULL after an error. */
static char *read_stdin(llm_job *job, size_t *length) {
    char *text = llm_read_all(stdin, 0, length);
    if (!text) refuse(job, "stdin cannot be read: %s", strerror(errno));
    return text;
}

/* Returns where text i begins in job->tokens. */
static int64_t row_begin(const llm_job *job, int64_t i) {
    return i > 0 ? job->ends[i - 1] : 0;
}

/* Appends a text of n tokens to the job. Returns 0 after an error. */
static int add_row(llm_job *job, const int32_t *ids, int64_t n) {
    const int64_t at = row_begin(job, job->rows);
    int32_t *tokens = (int32_t *)realloc(job->tokens, (size_t)(at + n + 1) * sizeof *tokens);
    if (tokens) job->tokens = tokens;
    int64_t *ends = (int64_t *)realloc(job->ends, (size_t)(job->rows + 1) * sizeof *ends);
    if (ends) job->ends = ends;
    if (!tokens || !ends) return !refuse(job, "not enough memory");
    memcpy(tokens + at, ids, (size_t)n * sizeof *ids);
    ends[job->rows++] = at + n;
    return 1;
}

/* Appends the tokens of a --prompt to the job as a text. Returns 0 after an error. */
static int read_prompt(llm_job *job, const char *text) {
    int32_t *ids = NULL;
    const int64_t n = text_encode(&job->codec, text, strlen(text), !job->no_special, &ids);
    const int ok = n < 0    ? !refuse(job, "%s", job->codec.error)
                   : n == 0 ? !refuse(job, "--prompt has no token")
                            : add_row(job, ids, n);
    free(ids);
    return ok;
}

/* Appends token numbers, each less than `vocabulary`, between blanks or commas, to the job as a
 * text. Returns 0 after an error. */
static int read_ids(llm_job *job, const char *at, int64_t vocabulary) {
    int32_t *ids = (int32_t *)malloc((strlen(at) / 2 + 2) * sizeof *ids);
    int64_t n = 0;
    int ok = ids ? 1 : !refuse(job, "not enough memory");
    while (ok) {
        char *end;
        at += strspn(at, " ,\t\r\n");
        if (!*at) break;
        const long long id = strtoll(at, &end, 10);
        if (end == at)
            ok = !refuse(job, "--ids: \"%.20s\" is not a number", at);
        else if (id < 0 || id >= vocabulary)
            ok = !refuse(job, "--ids: %lld is not one of the model's %lld tokens", id,
                         (long long)vocabulary);
        else
            ids[n++] = (int32_t)id;
        at = end;
    }
    if (ok && n == 0) ok = !refuse(job, "--ids has no token");
    ok = ok && add_row(job, ids, n);
    free(ids);
    return ok;
}

/* Runs --tokenize or --detokenize, from stdin to stdout. Returns 1 after an error, else 0. */
static int convert(llm_job *job) {
    int32_t *ids = NULL;
    size_t length;
    char *text = read_stdin(job, &length);
    int ok = text != NULL;
    if (ok && job->tokenize) {
        const int64_t n = text_encode(&job->codec, text, length, !job->no_special, &ids);
        for (int64_t i = 0; i < n; i++) printf("%s%d", i ? " " : "", (int)ids[i]);
        if (n >= 0) printf("\n");
        else ok = !refuse(job, "%s", job->codec.error);
        free(ids);
    } else if (ok && text[strspn(text, " \t\r\n")]) {
        ok = read_ids(job, text, text_count(&job->codec));
        if (ok && !text_print(&job->codec, job->tokens, (size_t)job->ends[0]))
            ok = !refuse(job, "%s", job->codec.error);
    }
    free(text);
    return !ok;
}

/* Reads all prompts into the job, and sets job->room to the tokens of the longest one and those to
 * be generated. Returns 0 after an error. */
static int read_prompts(llm_job *job) {
    const char *why = "";
    const int64_t most = llm_longest(&job->config, &why);
    int64_t longest = 0;
    int ok = 1;
    for (size_t i = 0; i < job->prompt_texts.count && ok; i++)
        ok = read_prompt(job, job->prompt_texts.at[i]);
    for (size_t i = 0; i < job->ids.count && ok; i++)
        ok = read_ids(job, job->ids.at[i], job->config.vocabulary);
    for (int64_t i = 0; i < job->rows; i++) {
        const int64_t n = job->ends[i] - row_begin(job, i);
        if (n > longest) longest = n;
    }
    /* With several prompts, prefill runs the last token of each after all others. Without a causal
     * mask those would have to attend to it, too, so only one prompt is possible. */
    if (ok && job->rows > 1 && !job->config.causal)
        return !refuse(job, "is_causal is false: such a model takes one prompt at a time");
    job->room = longest + job->max_new;
    if (!ok || !most || job->room <= most) return ok;
    return !refuse(job, "%lld tokens of the prompt and %lld new ones are more than %lld: %s",
                  (long long)longest, (long long)job->max_new, (long long)most, why);
}

/* -- generating, on every rank ----------------------------------------------- */

/* The state of one rank: model, texts, times. */
typedef struct llm_rank {
    llm_job *job;
    tsh_ctx *ctx;
    llm_net model;
    tsh_writer dump;
    float *row; /* (columns), for --dump-logits: the logits of a token, or an encoder's vector */
    int64_t columns;         /* length of `row`: size of the vocabulary, or of a vector */
    int first;               /* 1: rank 0 of the world, which reads and writes */
    int64_t rows, room;      /* number of texts; most tokens of each */
    int32_t *tokens;         /* (rows, room): prompts, then what is generated */
    /* Arrays (rows), an element for each text. count: number of its tokens; prompt: of its prompt's
     * tokens; taken: of generated tokens, without the final eos; lengths: of the tokens that the
     * current forward runs; ids: its next token; done: 1 if the text has ended. */
    int64_t *count, *prompt, *taken, *lengths, *ids;
    int32_t *done;
    text_out *out; /* (rows): the generated texts, which only rank 0 fills in */
    /* Points in time, in ns. start: the run of the prompt began; begun: the first new token was
     * known; end: the last new token was known. */
    int64_t start, begun, end;
} llm_rank;

/* Broadcasts rank 0's values to all ranks, without a timeout: rank 0 may wait for the user. Returns
 * 0 after an error. */
static int share(llm_rank *r, void *values, int64_t count, tsh_dtype dtype) {
    tsh_comm *world = tsh_world(r->ctx);
    tsh_coll coll = tsh_coll_make(TSH_BROADCAST, dtype);
    tsh_req req = 0;
    tsh_error error;
    coll.recv = values;
    coll.count = count;
    coll.root = 0;
    coll.timeout_ns = LLM_FOREVER;
    if (tsh_start(world, &coll, &req) == TSH_OK && tsh_wait(world, req) == TSH_OK) return 1;
    (void)tsh_comm_error(world, &error);
    (void)tsh_fail(r->ctx, error.code, "%s", error.message);
    return 0;
}

/* Reads the logits of token t into r->row, all of them on every rank. Returns 0 after an error. */
static int read_row(llm_rank *r, tsh_tensor *logits, int64_t t) {
    tsh_tensor *row = tsh_slice(tsh_cast(logits, TSH_F32), 1, t, 1);
    const size_t bytes = (size_t)r->columns * sizeof *r->row;
    return tsh_read(r->ctx, row, TSH_GLOBAL, r->row, bytes) == TSH_OK;
}

/* Returns 1 if tokens are drawn at random, 0 if the most likely one is taken. */
static int draws(const llm_job *job) {
    return !job->greedy && !(job->temperature < 0) &&
           (job->temperature > 0 || job->top_k > 0 || job->top_p > 0 || job->min_p > 0 ||
            job->seed > 0);
}

/* Draws the token that follows text b from its logits (1, 1, V), or takes the most likely one.
 * Other texts of the batch do not change it. Returns -1 after an error. */
static int64_t draw(llm_rank *r, tsh_tensor *logits, int64_t b) {
    const llm_job *job = r->job;
    tsh_sample_desc desc = {.penalty = job->penalty,
                            .temperature = draws(job) ? job->temperature : TSH_ZERO,
                            .top_k = job->top_k,
                            .top_p = job->top_p,
                            .min_p = job->min_p,
                            .seed = (uint64_t)job->seed,
                            .position = r->count[b]};
    int64_t id = -1;
    if (job->penalty > 0)
        desc.previous = tsh_from(r->ctx, r->tokens + b * r->room,
                                 tsh_shape3(1, 1, r->count[b]), TSH_I32);
    if (tsh_read(r->ctx, tsh_sample(logits, &desc), TSH_GLOBAL, &id, sizeof id) != TSH_OK) id = -1;
    return id;
}

/* Chooses the next token of each text from the last position of logits (rows, T, V), the most
 * likely or a drawn one, and appends it to r->tokens. It is the same on every rank. */
static void choose(llm_rank *r, tsh_tensor *logits) {
    const tsh_sample_desc likely = {.temperature = TSH_ZERO};
    tsh_tensor *last = tsh_slice(logits, 1, tsh_size(logits, 1) - 1, 1);
    int64_t *const ids = r->ids;
    if (r->job->penalty > 0 || draws(r->job)) {
        for (int64_t b = 0; b < r->rows; b++)
            if ((ids[b] = draw(r, tsh_slice(last, 0, b, 1), b)) < 0) return;
    } else if (tsh_read(r->ctx, tsh_sample(last, &likely), TSH_GLOBAL, ids,
                        (size_t)r->rows * sizeof *ids) != TSH_OK) {
        return;
    }
    for (int64_t b = 0; b < r->rows; b++)
        r->tokens[b * r->room + r->count[b]++] = (int32_t)ids[b];
}

/* Returns how many tokens the model has not run yet, of the text with most of them. */
static int64_t waiting(const llm_rank *r) {
    int64_t most = 0;
    for (int64_t b = 0; b < r->rows; b++) {
        const int64_t n = r->count[b] - r->model.past[b];
        if (n > most) most = n;
    }
    return most;
}

/* Runs the model on the tokens of each text that it has not run yet: at most the next n of each
 * text, without the last `keep` tokens of the text. Returns the logits, which the next
 * tsh_scope_end frees; NULL after an error. */
static tsh_tensor *compute(llm_rank *r, int64_t n, int64_t keep) {
    int64_t *const lengths = r->lengths;
    int32_t *ids = (int32_t *)calloc((size_t)(r->rows * n), sizeof *ids);
    tsh_tensor *logits = NULL;
    for (int64_t b = 0; b < r->rows && ids; b++) {
        const int64_t past = r->model.past[b], left = r->count[b] - keep - past;
        lengths[b] = left < 0 ? 0 : left < n ? left : n;
        memcpy(ids + b * n, r->tokens + b * r->room + past, (size_t)lengths[b] * sizeof *ids);
    }
    if (ids) logits = llm_logits(&r->model, ids, n, lengths);
    else (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
    free(ids);
    return logits;
}

/* Opens the file of --dump-logits, and writes its safetensors header. Returns 0 after an error. */
static int dump_open(llm_rank *r) {
    const llm_job *job = r->job;
    const long long rows = r->count[0], columns = r->columns;
    char header[256];
    unsigned char size[8];
    if (tsh_writer_open(&r->dump, job->dump, 0) != TSH_OK)
        return !refuse(r->job, "%s", r->dump.error.message);
    snprintf(header, sizeof header - 8,
             "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%lld,%lld],\"data_offsets\":[0,%lld]}}",
             rows, columns, rows * columns * 4);
    while (strlen(header) % 8) strcat(header, " ");
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)(strlen(header) >> (8 * i));
    tsh_writer_add(&r->dump, size, 8);
    tsh_writer_add(&r->dump, header, strlen(header));
    return 1;
}

/* Runs the model on the last token of each text, and appends the token that it generates. */
static void step(llm_rank *r) {
    tsh_scope_begin(r->ctx);
    tsh_tensor *logits = compute(r, 1, 0);
    if (logits) choose(r, logits);
    tsh_scope_end(r->ctx);
}

/* Runs the model on the prompts' tokens that the cache does not have, in chunks, and appends the
 * first token after each prompt. As several prompts end in different chunks, their last tokens are
 * run together in a step after all chunks. Returns 0 after an error. */
static int prefill(llm_rank *r) {
    llm_job *job = r->job;
    const int writes = job->dump && r->first;
    const int64_t keep = r->rows > 1, some = LLM_CHUNK / r->rows < 16 ? 16 : LLM_CHUNK / r->rows;
    const int64_t chunk = job->config.causal ? some : r->room;
    r->start = tsh_now();
    if (writes && !dump_open(r)) return 0;
    r->model.all = job->dump != NULL;
    r->model.expected = 0;
    for (int64_t b = 0; b < r->rows; b++)
        if (r->count[b] > r->model.expected) r->model.expected = r->count[b];
    for (int64_t left = waiting(r) - keep; left > 0 && tsh_ok(r->ctx); left -= chunk) {
        const int64_t n = left < chunk ? left : chunk;
        tsh_scope_begin(r->ctx);
        tsh_tensor *logits = compute(r, n, keep);
        const int64_t rows = logits ? tsh_size(logits, 1) : 0;
        for (int64_t t = 0; job->dump && t < rows && read_row(r, logits, t); t++)
            if (writes) tsh_writer_add(&r->dump, r->row, 4 * (size_t)r->columns);
        if (logits && n == left && !keep && job->max_new > 0) choose(r, logits);
        tsh_scope_end(r->ctx);
    }
    if (keep && job->max_new > 0 && tsh_ok(r->ctx)) step(r);
    r->model.all = 0;
    r->begun = r->end = tsh_now();
    const int bad = writes && tsh_writer_close(&r->dump, tsh_ok(r->ctx)) != TSH_OK;
    if (bad) refuse(job, "%s", r->dump.error.message);
    return tsh_ok(r->ctx) && !bad;
}

/* Returns 1 if token `id` ends a text. */
static int ends(const llm_job *job, int32_t id) {
    for (int i = 0; i < job->config.eos_count && !job->ignore_eos; i++)
        if (job->config.eos[i] == id) return 1;
    return 0;
}

/* Takes token `id`, which text b has generated: ends the text, or counts the token and, on rank 0,
 * prints it or adds it to the text. */
static void take(llm_rank *r, int64_t b, int32_t id) {
    llm_job *job = r->job;
    r->done[b] = ends(job, id);
    if (r->done[b]) return;
    r->taken[b]++;
    if (!r->first) return;
    if (job->print_ids && r->rows == 1) printf("%s%d", r->taken[b] > 1 ? " " : "", (int)id);
    if (job->print_ids) fflush(stdout);
    if (job->codec.tokenizer && !text_add(&r->out[b], id))
        (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
    r->done[b] = r->out[b].stopped;
}

/* Generates tokens until all texts have ended, or have `most` new ones. The first new token of each
 * was already appended by prefill. */
static void generate(llm_rank *r, int64_t most) {
    for (int64_t b = 0; b < r->rows; b++) r->done[b] = 0;
    for (int64_t b = 0; b < r->rows; b++) r->taken[b] = 0;
    /* 1: after each token rank 0 tells the others which texts have ended, as only it sees stop
     * strings and Ctrl-C */
    const int tells = r->job->stops.count > 0 || r->job->terminal;
    for (int64_t i = 0; i < most && tsh_ok(r->ctx); i++) {
        int all = 1;
        if (r->job->terminal && r->first && interrupted) r->done[0] = 1;
        for (int64_t b = 0; b < r->rows; b++)
            if (!r->done[b]) take(r, b, r->tokens[b * r->room + r->prompt[b] + i]);
        if (tells && !share(r, r->done, r->rows, TSH_I32)) return;
        for (int64_t b = 0; b < r->rows; b++) all &= r->done[b];
        if (all || i + 1 == most) break;
        step(r);
    }
    for (int64_t b = 0; b < r->rows && r->first; b++) (void)text_finish(&r->out[b]);
    r->end = tsh_now();
}

/* Prints several generated texts, each after its number; with --print-ids, a line with the ids of
 * each text instead. */
static void print_all(const llm_rank *r) {
    for (int64_t b = 0; b < r->rows; b++) {
        const int32_t *tokens = r->tokens + b * r->room + r->prompt[b];
        if (!r->job->print_ids) {
            printf("==> %lld <==\n", (long long)b + 1);
            if (!text_write(&r->job->codec, r->out[b].at ? r->out[b].at : "", r->out[b].length))
                (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
            printf("\n");
        }
        for (int64_t i = 0; i < r->taken[b] && r->job->print_ids; i++)
            printf("%s%d", i ? " " : "", (int)tokens[i]);
        if (r->job->print_ids) printf("\n");
    }
}

/* Prints to stderr how long the first token took, and how fast the others were generated. */
static void tell_speed(const llm_rank *r) {
    int64_t prompts = 0, more = 0;
    for (int64_t b = 0; b < r->rows; b++) prompts += r->prompt[b];
    for (int64_t b = 0; b < r->rows; b++) more += r->taken[b] > 0 ? r->taken[b] - 1 : 0;
    fprintf(stderr, "llm: first token after %.2f s (prompt: %lld tokens)",
            1e-9 * (double)(r->begun - r->start), (long long)prompts);
    if (more > 0)
        fprintf(stderr, "; then %.1f tokens/s", 1e9 * (double)more / (double)(r->end - r->begun));
    fprintf(stderr, "\n");
}

/* Runs --prompt and --ids: continues all prompts, as one batch. */
static void continue_prompts(llm_rank *r) {
    const llm_job *job = r->job;
    for (int64_t b = 0; b < r->rows; b++) {
        const int64_t begin = row_begin(job, b), n = job->ends[b] - begin;
        memcpy(r->tokens + b * r->room, job->tokens + begin, (size_t)n * sizeof *r->tokens);
        r->count[b] = r->prompt[b] = n;
    }
    if (!prefill(r) || job->max_new == 0) return;
    generate(r, job->max_new);
    if (!r->first || !tsh_ok(r->ctx)) return;
    if (r->rows > 1) print_all(r);
    else printf("\n");
    fflush(stdout);
    if (!job->print_ids) tell_speed(r);
}

/* Pools the vectors of a text's n tokens, (n, features), into the text's vector, and prints it. */
static void print_vector(llm_rank *r, const float *tokens, int64_t n) {
    embed_model *e = &r->job->vectors;
    double *vector = (double *)malloc((size_t)e->size * sizeof *vector);
    if (!vector || !embed_vector(e, tokens, n, vector))
        (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
    for (int64_t k = 0; k < e->size && tsh_ok(r->ctx); k++)
        printf("%s%.9g", k ? " " : "", vector[k]);
    printf("\n");
    free(vector);
}

/* Runs --embed: prints a vector for each line of the file. */
static void embed(llm_rank *r) {
    llm_job *job = r->job;
    const size_t width = (size_t)r->columns * sizeof(float);
    float *tokens = (float *)malloc((size_t)job->room * width + 1);
    if (!tokens) (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
    for (int64_t i = 0; i < job->rows && tsh_ok(r->ctx); i++) {
        const int64_t begin = row_begin(job, i), n = job->ends[i] - begin;
        tsh_scope_begin(r->ctx);
        r->model.past[0] = 0;
        r->model.expected = n;
        /* a vector for each token of the line, (1, n, features) */
        tsh_tensor *x = llm_logits(&r->model, job->tokens + begin, n, NULL);
        const int ok = x && tsh_read(r->ctx, tsh_cast(x, TSH_F32), TSH_GLOBAL, tokens,
                                     (size_t)n * width) == TSH_OK;
        tsh_scope_end(r->ctx);
        if (ok && r->first) print_vector(r, tokens, n);
    }
    free(tokens);
}

/* -- running a conversation -------------------------------------------------- */

/* The messages of a conversation, and statistics of its answers. Only rank 0 fills it in. */
typedef struct llm_talk {
    chat_message *messages; /* their texts come from malloc, and forget() frees them */
    size_t count;
    /* Sums over the answers. answers: their number; tokens: tokens of all prompts; computed: those
     * of them that the cache did not have; more: generated tokens, but the first of each answer. */
    int64_t answers, tokens, computed, more;
    int64_t waited, wrote; /* ns, summed over the answers: until the first token, and after it */
} llm_talk;

/* Appends a message with a copy of the text. Returns 0 if there is not enough memory. */
static int say(llm_talk *talk, chat_role role, const char *text) {
    chat_message *messages =
        (chat_message *)realloc(talk->messages, (talk->count + 1) * sizeof *messages);
    char *copy = (char *)malloc(strlen(text) + 1);
    if (messages) talk->messages = messages;
    if (!messages || !copy) {
        free(copy);
        return 0;
    }
    messages[talk->count].role = role;
    messages[talk->count++].text = strcpy(copy, text);
    return 1;
}

/* Removes n messages from the conversation, from index i on. */
static void forget(llm_talk *talk, size_t i, size_t n) {
    for (size_t k = i; k < i + n; k++) free((void *)(uintptr_t)talk->messages[k].text);
    talk->count -= n;
    memmove(talk->messages + i, talk->messages + i + n, (talk->count - i) * sizeof *talk->messages);
}

/* Tokenizes the conversation into *ids. While it does not fit into --context, the oldest question
 * and answer are forgotten. Returns the number of tokens; 0: even the last question alone does not
 * fit, and is forgotten; -1: an error. */
static int64_t encode_talk(llm_rank *r, llm_talk *talk, int32_t **ids) {
    llm_job *job = r->job;
    const size_t system = talk->messages[0].role == CHAT_SYSTEM;
    const int special = strcmp(job->format.style->name, "none") == 0;
    for (;;) {
        char *text = chat_render(&job->format, talk->messages, talk->count);
        if (!text) return -refuse(job, "%s", job->format.error);
        const int64_t n = text_encode(&job->codec, text, strlen(text), special, ids);
        free(text);
        if (n < 0) return -refuse(job, "%s", job->codec.error);
        if (n < r->room && n > 0) return n;
        free(*ids);
        *ids = NULL;
        const int last = talk->count < system + 3;
        fprintf(stderr, "llm: %lld tokens do not fit into %lld (--context): %s\n", (long long)n,
                (long long)r->room, last ? "this line is left out"
                                         : "the oldest question and its answer are forgotten");
        forget(talk, last ? talk->count - 1 : system, last ? 1 : 2);
        if (last) return 0;
    }
}

/* Reads the next line of stdin that is not empty, adds it to the conversation, and returns what
 * encode_talk does; but 0 at the end of stdin or after Ctrl-C, and -1 after an error. */
static int64_t ask(llm_rank *r, llm_talk *talk, int32_t **ids) {
    const int prompts = r->job->terminal;
    char *line = NULL;
    size_t room = 0;
    int64_t n = 0;
    interrupted = 0;
    while (n == 0) {
        if (prompts) printf("> ");
        fflush(stdout);
        if (prompts && !wait_for_line()) break;
        errno = 0;
        const ssize_t length = getline(&line, &room, stdin);
        if (length < 0 && errno == ENOMEM) n = -refuse(r->job, "not enough memory");
        if (length < 0) break;
        line[strcspn(line, "\r\n")] = 0;
        if (!line[0]) continue;
        n = say(talk, CHAT_USER, line) ? encode_talk(r, talk, ids)
                                       : -refuse(r->job, "not enough memory");
    }
    if (n == 0 && prompts) printf("\n");
    free(line);
    return n;
}

/* Adds the answer in r->out to the conversation and its statistics, and says on stderr if it was
 * cut. kept: tokens of the prompt that the cache had; most: how many the answer could have. Returns
 * 0 after an error. */
static int answered(llm_rank *r, llm_talk *talk, int64_t kept, int64_t most) {
    const text_out *out = r->out;
    printf("\n");
    fflush(stdout);
    if (interrupted)
        fprintf(stderr, "llm: you ended this answer; Ctrl-C now ends the conversation\n");
    else if (!r->done[0] && most < r->job->max_new)
        fprintf(stderr, "llm: the answer is cut: no more fits into %lld tokens (--context)\n",
                (long long)r->room);
    else if (!r->done[0])
        fprintf(stderr, "llm: the answer is cut after %lld tokens (--max-new)\n", (long long)most);
    talk->answers++;
    talk->tokens += r->prompt[0];
    talk->computed += r->prompt[0] - kept;
    talk->more += r->taken[0] > 0 ? r->taken[0] - 1 : 0;
    talk->waited += r->begun - r->start;
    talk->wrote += r->end - r->begun;
    const int ok = say(talk, CHAT_ASSISTANT, out->at ? out->at : "");
    text_clear(r->out);
    return ok ? 1 : !refuse(r->job, "not enough memory");
}

/* Asks for one question, and generates its answer; tokens that the cache has are not computed
 * again. Returns 0 at the end of the conversation, or after an error. */
static int exchange(llm_rank *r, llm_talk *talk) {
    const llm_job *job = r->job;
    int64_t head[2] = {0, 0}; /* [0]: tokens of the conversation; [1]: how many the cache has */
    int32_t *ids = NULL;
    if (r->first) {
        head[0] = ask(r, talk, &ids);
        /* Counts the first tokens whose keys the cache has. Without a causal mask there are none:
         * new tokens change the keys of all tokens before them. */
        while (job->config.causal && head[1] + 1 < head[0] && head[1] < r->model.past[0] &&
               ids[head[1]] == r->tokens[head[1]])
            head[1]++;
    }
    int ok = share(r, head, 2, TSH_I64) && head[0] > 0;
    if (ok && r->first)
        memcpy(r->tokens + head[1], ids + head[1], (size_t)(head[0] - head[1]) * sizeof *ids);
    free(ids);
    ok = ok && share(r, r->tokens + head[1], head[0] - head[1], TSH_I32);
    if (!ok) return 0;
    const int64_t left = r->room - head[0], most = left < job->max_new ? left : job->max_new;
    r->model.past[0] = head[1];
    r->count[0] = r->prompt[0] = head[0];
    if (!prefill(r)) return 0;
    generate(r, most);
    if (!tsh_ok(r->ctx)) return 0;
    return !r->first || answered(r, talk, head[1], most);
}

/* Runs --chat, until stdin or the conversation ends. */
static void converse(llm_rank *r) {
    const llm_job *job = r->job;
    llm_talk talk = {0};
    if (r->first && job->system && !say(&talk, CHAT_SYSTEM, job->system))
        (void)tsh_fail(r->ctx, TSH_ERR_MEMORY, "not enough memory");
    if (r->first && job->terminal) {
        catch_interrupts();
        fprintf(stderr, "llm: write a line to ask; Ctrl-C ends an answer, Ctrl-D or Ctrl-C at the "
                        "prompt the conversation\n");
    }
    while (tsh_ok(r->ctx) && exchange(r, &talk)) {}
    if (talk.answers > 0 && tsh_ok(r->ctx) && !job->print_ids)
        fprintf(stderr, "llm: first tokens after %.2f s, then %.1f tokens/s (%lld answers; "
                        "prompts: %lld tokens, %lld of them computed)\n",
                1e-9 * (double)talk.waited / (double)talk.answers,
                talk.wrote > 0 ? 1e9 * (double)talk.more / (double)talk.wrote : 0.0,
                (long long)talk.answers, (long long)talk.tokens, (long long)talk.computed);
    if (talk.count > 0) forget(&talk, 0, talk.count);
    free(talk.messages);
}

/* -- what each rank runs ----------------------------------------------------- */

/* Returns the dtype of weights for llm_model_load. */
static tsh_dtype weights_of(const llm_job *job) {
    return job->weights ? llm_dtype_named(job->weights)
           : job->dtype ? TSH_F32 /* --dtype sets all weights, GGUF's too */
                        : TSH_DTYPE_DEFAULT;
}

/* Loads the adapter of --adapter, and with --merge writes it into the weights. */
static void use_adapter(llm_rank *r) {
    const tune_job *tune = &r->job->tune;
    if (llm_model_adapter_add(&r->model, &tune->adapter) == TSH_OK &&
        llm_model_adapter_load(&r->model, &tune->adapter, tune->set.adapter) == TSH_OK &&
        tune->set.merge)
        (void)tsh_lora_merge(r->model.root);
}

static void run_model(llm_rank *r) {
    llm_job *job = r->job;
    const tsh_dtype weights = weights_of(job);
    tsh_no_grad_begin(r->ctx);
    llm_model_load(&r->model, r->ctx, &job->config, job->family, job->model, r->rows, r->room,
                   weights);
    if (tsh_ok(r->ctx) && job->tune.set.adapter) use_adapter(r);
    if (tsh_ok(r->ctx)) (job->embed ? embed : job->chat ? converse : continue_prompts)(r);
    tsh_no_grad_end(r->ctx);
}

/* Makes the state of a rank; rank_free frees it. NULL: not enough memory. */
static llm_rank *rank_new(llm_job *job, tsh_ctx *ctx) {
    const int vectors = job->config.encoder || job->config.headless;
    const size_t rows = (size_t)(job->chat || job->embed ? 1 : job->rows);
    llm_rank *r = (llm_rank *)calloc(1, sizeof *r);
    if (!r) return NULL;
    r->job = job;
    r->ctx = ctx;
    r->first = tsh_world(ctx)->rank == 0;
    r->rows = (int64_t)rows;
    r->room = job->room;
    r->columns = vectors ? job->config.width : job->config.vocabulary;
    r->row = (float *)malloc((size_t)r->columns * sizeof *r->row);
    r->tokens = (int32_t *)malloc((rows * (size_t)job->room + 1) * sizeof *r->tokens);
    r->out = (text_out *)calloc(rows, sizeof *r->out);
    r->done = (int32_t *)calloc(rows, sizeof *r->done);
    r->count = (int64_t *)calloc(5 * rows, sizeof *r->count);
    if (!r->row || !r->tokens || !r->out || !r->done || !r->count) return r;
    r->prompt = r->count + rows;
    r->taken = r->prompt + rows;
    r->lengths = r->taken + rows;
    r->ids = r->lengths + rows;
    for (size_t b = 0; b < rows; b++) {
        r->out[b].codec = &job->codec;
        r->out[b].stops = &job->stops;
        r->out[b].live = rows == 1 && !job->print_ids;
    }
    return r;
}

static void rank_free(llm_rank *r) {
    for (int64_t b = 0; r && r->out && b < r->rows; b++) text_clear(&r->out[b]);
    if (r) {
        free(r->count);
        free(r->done);
        free(r->out);
        free(r->tokens);
        free(r->row);
    }
    free(r);
}

static int run_rank(tsh_ctx *ctx, void *user) {
    llm_rank *r = rank_new((llm_job *)user, ctx);
    if (r && r->ids) run_model(r);
    else (void)tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    rank_free(r);
    return !tsh_ok(ctx);
}

/* -- what runs before the ranks start --------------------------------------- */

static int join_tcp(llm_job *job) {
#ifdef LLM_TCP
    tsh_error why;
    const tsh_uv_desc uv = {.error = &why};
    if (tsh_uv_open(&uv, &job->comm) != TSH_OK) return !refuse(job, "%s", why.message);
    job->joined = 1;
    return 1;
#else
    return !refuse(job, "built without TCP: install libuv1-dev and libsodium-dev, and build llm "
                        "again");
#endif
}

/* Returns how many groups of ranks there are that share a layer (tp): stages times replicas. */
static int count_groups(const llm_job *job) {
    const tune_settings *s = &job->tune.set;
    const int64_t groups = (s->pp ? s->pp : 1) * (s->dp ? s->dp : 1);
    return groups < INT_MAX ? (int)groups : INT_MAX;
}

/* Sets how many ranks there are, as threads of this process, and how many threads each has. */
static void choose_ranks(const llm_job *job, tsh_threads_desc *ranks, tsh_desc *desc) {
    const llm_config *c = &job->config;
    const cores_model model = {c->heads, c->kv_heads, job->tune.set.finetune != NULL};
    const int cores = tsh_threads_cores(), given = job->threads > 0 ? (int)job->threads : 1;
    const int groups = count_groups(job);
    const cores_choice best = cores_choose(&model, cores / given / groups, 1024 / groups,
                                           job->threads > 0 ? 1 : CORES_THREADS);
    ranks->ranks = (job->tp ? (int)job->tp : best.ranks) * groups;
    if (!job->tp && !job->threads) desc->threads = best.threads;
    ranks->bind = ranks->ranks * desc->threads == cores; /* 1: each thread is bound to a core */
}

/* Prints what choose_ranks has chosen. */
static void tell_ranks(const llm_job *job, const tsh_threads_desc *ranks, const tsh_desc *desc) {
    const long long dp = (long long)job->tune.set.dp;
    if (job->tp || job->print_ids || job->embed) return;
    fprintf(stderr, "llm: %d cores: ranks x threads %d x %d", tsh_threads_cores(), ranks->ranks,
            desc->threads);
    if (dp > 1) fprintf(stderr, ", dp %lld", dp);
    fprintf(stderr, "\n");
}

/* Sets desc->shares to those of --balance, kept in `shares`; prints what was measured. Returns 0
 * after an error. */
static int choose_shares(llm_job *job, tsh_desc *desc, int *shares) {
    char text[16 * BALANCE_RANKS] = "";
    if (!job->balance) return 1;
    desc->shares = shares;
    if (strcmp(job->balance, "auto") != 0)
        return (desc->tp <= BALANCE_RANKS && balance_parse(job->balance, desc->tp, shares)) ||
               !refuse(job,
                       "--balance is auto, or numbers from 1 for the %d ranks of tp, such as "
                       "2,1, not '%s'",
                       desc->tp, job->balance);
    if (job->comm.size > BALANCE_RANKS ||
        balance_measure(&job->comm, desc->tp, desc->threads, desc->dtype, shares) != TSH_OK)
        return !refuse(job,
                       "--balance auto: the speeds of %d ranks, at most %d, cannot be exchanged",
                       job->comm.size, BALANCE_RANKS);
    for (int t = 0; t < desc->tp; t++)
        tsh_text_add(text, sizeof text, "%s%d", t ? " : " : "", shares[t]);
    if (job->comm.rank == 0) fprintf(stderr, "llm: shares %s\n", text);
    return 1;
}

static int run(llm_job *job) {
    int shares[BALANCE_RANKS];
    tsh_desc desc = {.threads = job->threads ? (int)job->threads : 1, .logger = {heed, job}};
    tsh_threads_desc ranks = {0};
    int (*const fn)(tsh_ctx *ctx, void *user) = tunes_model(job) ? tune_run : run_rank;
    void *user = tunes_model(job) ? (void *)&job->tune : job;
    job->config.headless = job->embed != NULL;
    desc.dtype = job->dtype ? llm_dtype_named(job->dtype) : job->config.dtype;
    if (tunes_model(job)) desc.dtype = job->tune.dtype;
    desc.seed = (uint64_t)job->tune.set.seed;
    desc.pp = (int)job->tune.set.pp;
    if (job->wire) desc.wire = llm_dtype_named(job->wire);
    if (!job->joined) {
        choose_ranks(job, &ranks, &desc);
        tell_ranks(job, &ranks, &desc);
        desc.tp = ranks.ranks / count_groups(job);
        if (!choose_shares(job, &desc, shares)) return 1;
        return tsh_threads_run_with(&ranks, &desc, fn, user);
    }
    desc.tp = job->comm.size / count_groups(job);
    job->joined = 0; /* from here on, this function or the ctx closes the comm */
    if (!choose_shares(job, &desc, shares)) {
        tsh_comm_close(&job->comm);
        return 1;
    }
    desc.comm = job->comm;
    return tsh_run(&desc, fn, user);
}

static int open_codec(llm_job *job) {
    if (text_open(&job->codec, job->tokenizer_file, job->model, job->pre)) return 1;
    return !refuse(job, "%s", job->codec.error);
}

static int convert_text(llm_job *job) {
    /* A file or pipe gets control characters, too, so that --detokenize writes the very bytes that
     * --tokenize read. */
    if (!isatty(STDOUT_FILENO)) job->codec.raw = 1;
    return !open_codec(job) || convert(job);
}

/* Reads a file that the model's folder may have; *text is NULL if it has none. Returns 0 after an
 * error. */
static int read_optional(llm_job *job, const char *name, char **text) {
    tsh_error why;
    *text = llm_read_text(job->model, name, &why);
    return *text || llm_is_absent(errno) || !refuse(job, "%s", why.message);
}

/* Appends the tokens of a line of --embed's file to the job as a text. Returns 0 after an error. */
static int read_line(llm_job *job, const char *line, size_t length) {
    int32_t *ids = NULL;
    const int64_t n = embed_encode(&job->vectors, job->codec.tokenizer, line, length,
                                   !job->no_special, &ids);
    const int64_t most = job->config.places;
    const int ok = n < 0    ? !refuse(job, "%s", job->vectors.error)
                   : n == 0 ? !refuse(job, "%s: line %lld has no token", job->embed,
                                      (long long)job->rows + 1)
                   : most && n > most
                       ? !refuse(job, "%s: line %lld has %lld tokens; the model has %lld positions",
                                 job->embed, (long long)job->rows + 1, (long long)n,
                                 (long long)most)
                       : add_row(job, ids, n);
    if (ok && n > job->room) job->room = n;
    free(ids);
    return ok;
}

/* Reads the lines of --embed's file into the job. Returns 0 after an error. */
static int read_lines(llm_job *job) {
    size_t length = 0;
    FILE *file = fopen(job->embed, "rb"); /* --embed may name a pipe */
    char *text = file ? llm_read_all(file, 0, &length) : NULL;
    int ok = text != NULL;
    if (!text) refuse(job, "%s: %s", job->embed, strerror(errno));
    if (file) (void)fclose(file);
    ok = ok && (embed_begin(&job->vectors, &job->config) ||
                !refuse(job, "%s", job->vectors.error));
    job->max_new = job->room = 0;
    for (const char *line = text, *end = text ? text + length : NULL; ok && line < end;) {
        const char *newline = (const char *)memchr(line, '\n', (size_t)(end - line));
        const char *stop = newline ? newline : end;
        ok = read_line(job, line, (size_t)(stop - line));
        line = stop + 1;
    }
    free(text);
    return ok;
}

/* Reads modules.json for --embed, which may say that the model is in a subfolder. Returns 0 after
 * an error. */
static int open_vectors(llm_job *job) {
    if (!embed_open(&job->vectors, job->model)) return !refuse(job, "%s", job->vectors.error);
    job->model = job->vectors.folder;
    job->codec.lower = job->vectors.lower;
    return 1;
}

/* Opens the chat template of the model, or that of --template; job->format.error says why there is
 * none. Returns 0 if a file cannot be read. */
static int read_format(llm_job *job) {
    gguf *g = job->config.gguf;
    char *config = g ? gguf_tokenizer_config(g) : NULL, *jinja = NULL;
    if (g && !config) return !refuse(job, "%s", g->error);
    const int ok = (g || read_optional(job, "tokenizer_config.json", &config)) &&
                   read_optional(job, "chat_template.jinja", &jinja);
    if (ok) (void)chat_open(&job->format, config, jinja, job->template_name);
    free(config);
    free(jinja);
    return ok;
}

/* Opens the chat template as read_format, and checks it: renders a question after the text of
 * --system. Returns 0 after an error. */
static int open_format(llm_job *job) {
    const chat_message first[] = {{CHAT_SYSTEM, job->system}, {CHAT_USER, "?"}};
    if (!read_format(job)) return 0;
    int ok = job->format.error[0] == 0;
    if (ok) {
        char *text = chat_render(&job->format, first + !job->system, job->system ? 2 : 1);
        ok = text != NULL;
        free(text);
    }
    return ok ? 1 : !refuse(job, "%s", job->format.error);
}

/* Adds the token with which the chat template ends an answer to the tokens that end a text
 * (config.eos). Returns 0: not enough memory. */
static int add_chat_end(llm_job *job) {
    llm_config *c = &job->config;
    char *end = chat_end(&job->format);
    if (!end) return !refuse(job, "not enough memory");
    const int32_t id = *end ? llm_tokenizer_id(job->codec.tokenizer, end) : -1;
    if (id >= 0 && c->eos_count < LLM_MOST_EOS) c->eos[c->eos_count++] = id;
    free(end);
    return 1;
}

/* Returns the number of a key of generation_config.json, which must be from 0 to `most`;
 * `otherwise` if the key is absent or null; -1 after an error. */
static double generation_number(llm_job *job, const cJSON *config, const char *key, double most,
                                double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, key);
    char text[80];
    if (!item || cJSON_IsNull(item)) return otherwise;
    if (cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble <= most)
        return item->valuedouble;
    (void)refuse(job, "generation_config.json: %s is %s, not a number from 0 to %g", key,
                 llm_json_text(item, text, sizeof text), most);
    return -1;
}

/* Sets temperature, top-p and so on where no flag does: as generation_config.json says if it
 * samples, else to values with which small models do not repeat themselves. Returns 0 after an
 * error. */
static int choose_sampling(llm_job *job) {
    static const char *const keys[] = {"do_sample", "temperature", "top_k", "top_p", "min_p"};
    char *text = NULL;
    if (!job->config.gguf && !read_optional(job, "generation_config.json", &text)) return 0;
    cJSON *config = text ? llm_parse(text) : NULL;
    if (text && !config && errno == ENOMEM) {
        free(text);
        return !refuse(job, "not enough memory");
    }
    const cJSON *samples = cJSON_GetObjectItemCaseSensitive(config, "do_sample"), *item;
    int says = 0;
    free(text);
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !cJSON_IsFalse(samples); i++) {
        item = cJSON_GetObjectItemCaseSensitive(config, keys[i]);
        says |= item && !cJSON_IsNull(item);
    }
    const cJSON *from = says ? config : NULL;
    const double temperature = generation_number(job, from, "temperature", 1e6, says ? 1 : 0.7);
    const double top_p = generation_number(job, from, "top_p", 1, says ? 1 : 0.9);
    const double top_k = generation_number(job, from, "top_k", 1e9, says ? 50 : 0);
    const double min_p = generation_number(job, from, "min_p", 1, 0);
    const double penalty = generation_number(job, config, "repetition_penalty", 1e6, 1);
    if (job->temperature == 0) job->temperature = temperature == 0 ? TSH_ZERO : temperature;
    if (job->top_p == 0 && top_p > 0) job->top_p = top_p;
    if (job->top_k == 0) job->top_k = (int64_t)top_k;
    if (job->min_p == 0) job->min_p = min_p;
    if (job->penalty == 0 && penalty != 1) job->penalty = penalty;
    cJSON_Delete(config);
    return temperature >= 0 && top_p >= 0 && top_k >= 0 && min_p >= 0 && penalty >= 0;
}

/* Sets how many tokens a conversation may have, its template, what ends an answer, and how tokens
 * are drawn. Returns 0 after an error. */
static int prepare_chat(llm_job *job) {
    llm_config *c = &job->config;
    const char *why = "the model has no more positions";
    const cJSON *trained = cJSON_GetObjectItem(c->unread, "max_position_embeddings");
    int64_t most = llm_longest(c, &why);
    if (!trained) trained = cJSON_GetObjectItem(c->read, "max_position_embeddings");
    if (cJSON_IsNumber(trained) && trained->valuedouble >= 1 && trained->valuedouble < 1e9 &&
        (!most || trained->valuedouble < (double)most))
        most = (int64_t)trained->valuedouble;
    if (most && job->context > most)
        return !refuse(job, "--context %lld is more than %lld: %s", (long long)job->context,
                       (long long)most, why);
    job->room = job->context ? job->context : most && most < LLM_CONTEXT ? most : LLM_CONTEXT;
    if (!open_format(job)) return 0;
    if (!add_chat_end(job)) return 0;
    job->terminal = strcmp(job->backend, "threads") == 0 && isatty(STDIN_FILENO) &&
                    isatty(STDOUT_FILENO);
    return job->greedy || choose_sampling(job);
}

/* Fills in job->tune, which finetune.h and plan.h read, from the flags and the config. */
static void fill_tune(llm_job *job) {
    tune_job *tune = &job->tune;
    const tsh_dtype own = job->config.dtype;
    tune->model = job->model;
    tune->dtype_name = job->dtype;
    tune->weights_name = job->weights;
    tune->weights = weights_of(job);
    /* f16 has too small a range for gradients: a model of f16 is trained in f32 */
    tune->dtype = job->dtype ? llm_dtype_named(job->dtype) : own == TSH_F16 ? TSH_F32 : own;
    tune->config = &job->config;
    tune->family = job->family;
    tune->codec = &job->codec;
    tune->format = &job->format;
    tune->joins = job->joined;
    tune->rank = job->comm.rank;
    tune->set.seed = job->seed;
    tune->set.context = job->context;
    tune->set.max_new = job->max_new;
}

/* Sets p->train, and how many rows and tokens the batch has that --plan computes. Returns 0 after
 * an error. */
static int plan_batch(llm_job *job, llm_plan *p) {
    tune_job *tune = &job->tune;
    const char *why = "";
    const int64_t most = llm_longest(&job->config, &why);
    p->train = tune->set.finetune != NULL || tune->set.lora > 0;
    if (!p->train && p->pp > 1)
        return !refuse(job, "--pp is for --finetune; share the layers by --tp to generate");
    if (!p->train) {
        p->rows = tune->set.batch ? tune->set.batch : 1;
        p->length = job->context ? job->context : most && most < LLM_CONTEXT ? most : LLM_CONTEXT;
        if (!most || p->length <= most) return 1;
        return !refuse(job, "--context %lld is more than %lld: %s", (long long)p->length,
                       (long long)most, why);
    }
    if (!tune_check_model(tune) || !tune_context(tune) || !tune_split(tune))
        return !refuse(job, "%s", tune->error);
    p->rows = tune->rows;
    p->length = tune->set.context;
    p->accumulate = (int)tune->set.accumulate;
    return 1;
}

/* Computes the memory that the job would take. Returns 0 after an error. */
static int plan_make(llm_job *job, llm_plan *p) {
    const tune_settings *s = &job->tune.set;
    const llm_config *c = &job->config;
    tsh_desc desc = {.threads = job->threads ? (int)job->threads : 1};
    tsh_threads_desc ranks = {0};
    const llm_plan plan = {.zero = s->zero, .recompute = s->recompute, .lora = (int)s->lora,
                           .pp = (int)s->pp, .dp = s->dp ? (int)s->dp : 1,
                           .weights = weights_of(job)};
    *p = plan;
    if (!plan_batch(job, p)) return 0;
    choose_ranks(job, &ranks, &desc);
    p->dtype = p->train ? job->tune.dtype : job->dtype ? llm_dtype_named(job->dtype) : c->dtype;
    p->tp = ranks.ranks / count_groups(job);
    p->threads = desc.threads;
    return llm_plan_run(p, &job->config, job->family) || !refuse(job, "%s", p->error);
}

/* To fine-tune by LoRA, or to evaluate: sets --dp to as many cores as divide --batch, unless flags
 * say how ranks share the work, or the copies of the weights would not fit into the memory there
 * is. Replicas wait for each other once a step, and compute nothing twice. */
static void share_rows(llm_job *job) {
    tune_settings *s = &job->tune.set;
    const tune_settings given = *s;
    const int64_t there = llm_plan_available(), batch = s->batch ? s->batch : TUNE_BATCH;
    const int tunes = s->evaluate || (s->finetune && s->lora);
    int64_t copies = tsh_threads_cores() / (job->threads > 0 ? job->threads : 1);
    if (!tunes || job->joined || job->tp || s->dp || s->pp || s->zero) return;
    for (; copies > 1 && s->dp == 0; copies--) {
        llm_plan p;
        int fits;
        if (batch % copies) continue;
        s->dp = copies;
        fits = plan_make(job, &p) && (there < 0 || p.all <= (double)there);
        *s = given; /* undoes what plan_make has changed */
        s->dp = fits ? copies : 0;
    }
    job->error[0] = job->tune.error[0] = 0; /* prepare_tune will find and report errors again */
}

/* Reads the chat template and the data for finetune.h, and checks the flags. Returns 0 after an
 * error. */
static int prepare_tune(llm_job *job) {
    tune_job *tune = &job->tune;
    fill_tune(job);
    share_rows(job);
    if (job->joined && job->comm.size % count_groups(job))
        return !refuse(job, "--dp %lld times --pp %lld does not divide the %d ranks",
                       (long long)(tune->set.dp ? tune->set.dp : 1),
                       (long long)(tune->set.pp ? tune->set.pp : 1), job->comm.size);
    if (!read_format(job) || (job->format.style && !add_chat_end(job))) return 0;
    return tune_prepare(tune) || !refuse(job, "%s", tune->error);
}

/* Prints a warning; of several processes only rank 0 does. */
static void warn(void *user, const char *sentence) {
    if (((const llm_job *)user)->comm.rank == 0) fprintf(stderr, "llm: warning: %s\n", sentence);
}

/* Returns the options for reading a model that follow from the flags. */
static llm_options read_options(llm_job *job) {
    llm_options options = {.unknown_keys = job->allow_unknown_keys, .warn = warn, .user = job};
    if (job->ignored.count) options.ignore = (const char *const *)job->ignored.at;
    return options;
}

/* Reads the config of --adapter. Returns 0 after an error. */
static int read_adapter(llm_job *job) {
    tsh_error why;
    const char *folder = job->tune.set.adapter;
    if (!folder || llm_adapter_read(&job->tune.adapter, folder, &why)) return 1;
    return !refuse(job, "%s", why.message);
}

/* Reads the model's files except its weights, and the prompts or lines. Returns 0 after an
 * error. */
static int prepare(llm_job *job) {
    llm_config *c = &job->config;
    const llm_options options = read_options(job);
    if (job->embed && !open_vectors(job)) return 0;
    if (!llm_config_read_with(c, job->model, &job->family, &options))
        return !refuse(job, "%s", c->error);
    const int texts = job->embed || job->chat || job->prompt_texts.count || job->stops.count ||
                      tunes_model(job);
    if ((texts || !job->print_ids) && !open_codec(job)) return 0;
    job->codec.vocabulary = c->vocabulary;
    if (job->embed) return read_lines(job);
    if (tunes_model(job)) return prepare_tune(job);
    if (!read_adapter(job)) return 0;
    if (job->max_new < 0) job->max_new = job->chat ? LLM_ANSWER : LLM_NEW;
    if (c->encoder && job->max_new > 0)
        return !refuse(job, "%s generates no text; give --embed FILE", c->type);
    return job->chat ? prepare_chat(job) : read_prompts(job);
}

/* -- how much memory a run would take ------------------------------------------ */

/* Runs --plan. Returns 1 after an error, else 0. */
static int plan_run(llm_job *job) {
    llm_config *c = &job->config;
    const llm_options options = read_options(job);
    llm_plan p;
    if (!llm_config_read_with(c, job->model, &job->family, &options))
        return refuse(job, "%s", c->error);
    fill_tune(job);
    share_rows(job);
    if (!plan_make(job, &p)) return 1;
    llm_plan_print(stdout, &p);
    return 0;
}

/* -- a model that only rank 0 has --------------------------------------------- */

/* Returns 1 if --model is no file on this host, and no folder with config.json (or, with --embed,
 * modules.json). */
static int lacks_model(const llm_job *job) {
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", job->model);
    if (access(path, R_OK) == 0 || errno == ENOTDIR) return 0; /* ENOTDIR: --model is a file */
    snprintf(path, sizeof path, "%s/modules.json", job->model);
    return !job->embed || access(path, R_OK) != 0;
}

/* What rank 0 sends to the other ranks if one of them has no model: what it read, or its error. */
typedef struct llm_found {
    /* ok: 0 if rank 0 has only an error; text: number of bytes that model_text returned; tokens:
     * number of tokens of all texts together; rows, room, max_new: as in llm_job */
    int64_t ok, text, tokens, rows, room, max_new;
    int64_t top_k;
    double temperature, top_p, min_p, penalty;
    int64_t eos_count, eos[LLM_MOST_EOS];
    int64_t tied; /* 1: the head has the embedding's weight */
    int64_t gguf; /* bytes of the GGUF file, if its header is sent; 0: config.json is sent */
    char error[TSH_MESSAGE_SIZE];
} llm_found;

/* Returns the text that rank 0 sends to the others in place of the files: config.json, or a GGUF
 * file up to its tensors' values. *n: its length in bytes. After it a 0 and up to 3 more bytes can
 * be read, to a multiple of 4. NULL: not enough memory, or no such file. */
static char *model_text(const llm_job *job, int64_t *n) {
    const gguf *g = job->config.gguf;
    tsh_error why;
    char *text = g ? (char *)calloc(1, g->data + 4)
                   : llm_read_text(job->model, "config.json", &why);
    if (g && text) memcpy(text, g->bytes, g->data);
    if (text) *n = g ? (int64_t)g->data : (int64_t)strlen(text);
    return text;
}

static void fill_found(const llm_job *job, llm_found *found, int ok) {
    const llm_config *c = &job->config;
    found->ok = ok;
    found->tied = c->tied;
    found->gguf = c->gguf ? (int64_t)c->gguf->size : 0;
    found->rows = job->rows;
    found->tokens = row_begin(job, job->rows);
    found->room = job->room;
    found->max_new = job->max_new;
    found->top_k = job->top_k;
    found->temperature = job->temperature;
    found->top_p = job->top_p;
    found->min_p = job->min_p;
    found->penalty = job->penalty;
    found->eos_count = c->eos_count;
    memcpy(found->eos, c->eos, sizeof c->eos);
    memcpy(found->error, job->error, sizeof found->error);
}

/* Broadcasts the RoPE frequency factors of rank 0's GGUF file, which are tensors and not part of
 * its header. On the other ranks g, made of the header alone, receives them. */
static tsh_result send_factors(tsh_comm *world, gguf *g) {
    static const char *const names[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                        "rope_factors_short.weight"};
    tsh_result result = TSH_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const gguf_tensor *t = gguf_tensor_named(g, names[i]);
        if (t && result == TSH_OK)
            result = tsh_broadcast(world, (char *)g->map + g->data + t->offset,
                                   (int64_t)t->bytes / 4, TSH_I32, 0);
    }
    return result;
}

/* On the other ranks: reads the configuration from text (see model_text), and sets what rank 0
 * found. Returns 0 after an error. */
static int take_found(llm_job *job, const llm_found *found, const char *text) {
    llm_config *c = &job->config;
    char error[512];
    int ok;
    c->options = read_options(job);
    job->rows = found->rows;
    job->room = found->room;
    job->max_new = found->max_new;
    job->top_k = found->top_k;
    job->temperature = found->temperature;
    job->top_p = found->top_p;
    job->min_p = found->min_p;
    job->penalty = found->penalty;
    if (found->gguf) {
        c->gguf = gguf_of_header(text, (size_t)found->text, (size_t)found->gguf, job->model, error,
                                 sizeof error);
        if (!c->gguf) return !refuse(job, "%s", error);
        if (send_factors(&job->comm, c->gguf) != TSH_OK)
            return !refuse(job, "the files of rank 0 do not arrive");
        ok = llm_gguf_take(c, job->model);
    } else {
        ok = llm_config_take(c, llm_parse(text), "rank 0's config.json");
    }
    if (!ok || !llm_config_rest(c, job->model, &job->family)) return !refuse(job, "%s", c->error);
    c->tied = (int)found->tied;
    c->eos_count = (int)found->eos_count;
    memcpy(c->eos, found->eos, sizeof c->eos);
    return 1;
}

/* Called on all ranks if one of them has no model: rank 0 sends what it read, or its error if ok is
 * 0, and the others receive it. Returns 0 after an error. */
static int send_found(llm_job *job, int ok) {
    tsh_comm *world = &job->comm;
    const int first = world->rank == 0;
    llm_found found = {0};
    char *text = first && ok ? model_text(job, &found.text) : NULL;
    if (first && ok && !text) refuse(job, "not enough memory");
    if (first) fill_found(job, &found, text != NULL);
    tsh_result result = tsh_broadcast(world, &found, sizeof found / 4, TSH_I32, 0);
    if (result == TSH_OK && !found.ok) {
        free(text);
        return !refuse(job, "%s", found.error);
    }
    if (!first) {
        text = (char *)calloc(1, (size_t)found.text + 4);
        job->tokens = (int32_t *)malloc((size_t)(found.tokens + 1) * sizeof *job->tokens);
        job->ends = (int64_t *)malloc((size_t)(found.rows + 1) * sizeof *job->ends);
    }
    /* ok is 0 if this rank has no memory for what is broadcast: it skips the broadcasts below,
     * which then fail on the other ranks */
    ok = text && (first || (job->tokens && job->ends));
    if (ok && result == TSH_OK) /* the text and the 0 after it are sent as words of 4 bytes */
        result = tsh_broadcast(world, text, found.text / 4 + 1, TSH_I32, 0);
    if (ok && result == TSH_OK && found.tokens)
        result = tsh_broadcast(world, job->tokens, found.tokens, TSH_I32, 0);
    if (ok && result == TSH_OK && found.rows)
        result = tsh_broadcast(world, job->ends, found.rows, TSH_I64, 0);
    if (!ok) refuse(job, "not enough memory");
    else if (result != TSH_OK) ok = !refuse(job, "the files of rank 0 do not arrive");
    if (ok && !first) ok = take_found(job, &found, text);
    if (ok && first && found.gguf && send_factors(world, job->config.gguf) != TSH_OK)
        ok = !refuse(job, "the factors of rotary positions cannot be sent to the other ranks");
    job->config.broadcast = 1;
    free(text);
    return ok;
}

#ifdef LLM_TCP
/* The functions of a tsh_hasher for BLAKE2b. state: a crypto_generichash_state of libsodium. */
static void hash_begin(void *state) {
    (void)crypto_generichash_init((crypto_generichash_state *)state, NULL, 0, 32);
}

static void hash_add(void *state, const void *bytes, size_t count) {
    (void)crypto_generichash_update((crypto_generichash_state *)state,
                                    (const unsigned char *)bytes, count);
}

static void hash_end(void *state, unsigned char hash[32]) {
    (void)crypto_generichash_final((crypto_generichash_state *)state, hash, 32);
}

/* Makes the folder of --cache, and sets the options of config with which the weights are loaded by
 * it: .cache, .hasher and .stamp. Returns 0 after an error. */
static int open_cache(llm_job *job) {
    static const tsh_hasher blake2b = {sizeof(crypto_generichash_state), hash_begin, hash_add,
                                       hash_end};
    struct stat info;
    int64_t facts[4] = {0};
    if (job->cache && mkdir(job->cache, 0777) != 0 && errno != EEXIST)
        return !refuse(job, "--cache: the folder %s cannot be made: %s", job->cache,
                       strerror(errno));
    if (job->config.gguf && stat(job->model, &info) == 0 && time(NULL) - info.st_ctime >= 2) {
        facts[0] = (int64_t)info.st_ino;
        facts[1] = (int64_t)info.st_size;
        facts[2] = (int64_t)info.st_mtime;
        facts[3] = (int64_t)info.st_ctime;
    }
    job->config.cache = job->cache;
    job->config.hasher = &blake2b;
    job->config.stamp = facts[0] ? state_hash(STATE_HASH, facts, sizeof facts) : 0;
    return 1;
}
#else
static int open_cache(llm_job *job) {
    return !refuse(job, "built without TCP");
}
#endif

static int run_texts(llm_job *job) {
    int64_t lacking = 0;
    int ok = 1;
    if (strcmp(job->backend, "tcp") == 0) {
        if (!join_tcp(job)) return 1;
        lacking = lacks_model(job);
        if (tsh_allreduce(&job->comm, &lacking, 1, TSH_I64, TSH_MAX) != TSH_OK)
            ok = !refuse(job, "the ranks do not meet");
    }
    if (ok && lacking && (tunes_model(job) || job->tune.set.adapter))
        ok = !refuse(job, "a rank's host has no %s, which --finetune, --evaluate and --adapter "
                     "need on each", job->model);
    if (ok && (!lacking || job->comm.rank == 0)) ok = prepare(job);
    if (lacking) ok = send_found(job, ok) && open_cache(job);
    if (!ok && job->joined) tsh_comm_close(&job->comm);
    ok = ok && run(job) == 0 && !job->error[0];
    if (ok && tunes_model(job) && !tune_finish(&job->tune)) refuse(job, "%s", job->tune.error);
    return !ok || job->error[0] != 0;
}

int main(int argc, char **argv) {
    llm_job job = {.backend = "threads", .max_new = -1, .tune.set.warmup = -1};
    output_begin();
    int failed = parse(&job, argc, argv);
    if (failed == 0) failed = check_flags(&job);
    if (failed == 0) {
        pthread_mutex_init(&job.lock, NULL);
        failed = job.plan                         ? plan_run(&job)
                 : job.tokenize || job.detokenize ? convert_text(&job)
                                                  : run_texts(&job);
        if (!tune_close(&job.tune) && !failed) failed = refuse(&job, "%s", job.tune.error);
        if (failed) fprintf(stderr, "llm: %s\n", job.error[0] ? job.error : "it did not end well");
        pthread_mutex_destroy(&job.lock);
    }
    text_close(&job.codec);
    embed_close(&job.vectors);
    chat_close(&job.format);
    llm_config_free(&job.config);
    free(job.tokens);
    free(job.ends);
    free(job.prompt_texts.at);
    free(job.ids.at);
    free(job.stops.at);
    free(job.ignored.at);
    return failed > 0 ? failed : output_end("llm");
}
