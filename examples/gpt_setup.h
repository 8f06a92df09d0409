/* gpt_setup.h - what gpt.c is asked to do: its flags, and the text it learns
 *
 * Every mistake of the caller is told in one sentence on stderr, and is exit code 2. */
#ifndef GPT_SETUP_H
#define GPT_SETUP_H

#include "../tshard.h" /* TSH_PRINTF */

#include "balance.h"
#include "cores.h"
#include "llm/quote.h"
#include <errno.h>
#include <glob.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> /* access */

/* == settings ============================================================== */

enum { MAX_RANKS = 64, BAD_USE = 2 };

typedef struct gpt_settings {
    const char *text; /* NULL: the sources of this project */
    const char *out;
    const char *policy; /* NULL: the plan in gpt.c */
    const char *dtype;  /* of the parameters: "f32", "bf16" */
    const char *weights; /* of the sample: "q8_0", "q4_0"; NULL: as trained */
    const char *backend;
    const char *gemm;
    const char *trace, *save;                        /* NULL: none */
    int joins, chars, sequence_parallel, checkpoint; /* joins: backend has a process per rank */
    int resume;
    int64_t ranks, tp, threads; /* tp 0: ranks / pp / dp; threads: of each rank */
    int64_t pp, dp, micro_batches;                   /* dp 0: what tp and pp leave of the ranks */
    int chosen;     /* 1: no flag says how many ranks there are */
    int64_t outer, outer_fragments, outer_delay; /* of tsh_outer_desc; outer 0: replicas exchange
                                                  * gradients in every step */
    const char *outer_wire; /* NULL: f32 */
    const char *wire;       /* of activations; NULL: as they are */
    int zero, pure; /* pure: nothing but bf16 is kept; no flag sets it */
    const char *stages;    /* layers of each stage, "2,3"; NULL: equally many */
    int counts[MAX_RANKS]; /* what stages says */
    const char *balance;   /* "auto", or a share for each rank of tp, "2,1"; NULL: all the same */
    int shares[MAX_RANKS]; /* what balance says; [0] 0: nothing yet */
    int64_t layers, heads, width, context, vocabulary;
    int64_t batch, steps, eval_every, save_every, seed, sample;
    double lr, dropout;
} gpt_settings;

static const gpt_settings defaults = {
    .out = "build/run",
    .backend = "threads",
    .gemm = "builtin",
    .dtype = "f32",
    .pp = 1,
    .micro_batches = 1,
    .layers = 4,
    .heads = 4,
    .width = 128,
    .context = 64,
    .batch = 12,
    .steps = 600,
    .eval_every = 100,
    .save_every = 100,
    .outer_fragments = 1,
    .seed = 1337,
    .sample = 400,
    .lr = 1e-3,
};

/* Says in one sentence why gpt cannot run; returns the exit code for that. */
TSH_PRINTF(1, 2) static int refuse(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "gpt: %s\n", quote_message(text));
    return BAD_USE;
}

/* == flags ================================================================= */

enum { FLAGS = 41 };

/* A flag sets what one of its pointers points to. */
typedef struct gpt_flag {
    const char *name, *help;
    const char **string;
    int64_t *whole;
    double *real;
    int *on;
    double low, high; /* of a number */
} gpt_flag;

static void make_flags(gpt_flag flags[FLAGS], gpt_settings *s, int *help) {
    const gpt_flag list[FLAGS] = {
        {"text", "file to learn; else the C sources of this project", .string = &s->text},
        {"chars", "tokens are the distinct characters of the text, not all 256 bytes",
         .on = &s->chars},
        {"backend", "threads: of this process; tcp, mpi: a process per rank, by tshard-run, mpirun",
         .string = &s->backend},
        {"gemm", "products: builtin, or blis where gpt was built with it", .string = &s->gemm},
        {"dtype", "of parameters and activations: f32 or bf16", .string = &s->dtype},
        {"weights", "of the model that writes the sample: q8_0, q4_0, 8 or 4 bits; else as trained",
         .string = &s->weights},
        {"ranks", "threads that share the work; 0: chosen for the cores of this host",
         .whole = &s->ranks, .high = MAX_RANKS},
        {"tp", "ranks that share the layers of one copy of the model; 0: what pp and dp leave",
         .whole = &s->tp, .high = MAX_RANKS},
        {"pp", "stages of a pipeline of layers", .whole = &s->pp, .low = 1, .high = MAX_RANKS},
        {"dp", "copies of the model, which share the texts of a batch; 0: what tp and pp leave",
         .whole = &s->dp, .high = MAX_RANKS},
        {"zero", "cut the optimiser's moments over these copies", .on = &s->zero},
        {"outer", "steps that each copy takes by itself before copies meet (DiLoCo); 0: none",
         .whole = &s->outer, .high = 1e9},
        {"outer-wire", "what copies then send: f32, bf16, q8_0, q4_0", .string = &s->outer_wire},
        {"wire", "of activations between ranks: bf16, q8_0, q4_0; else exact", .string = &s->wire},
        {"outer-fragments", "parts of the model, which meet in turn", .whole = &s->outer_fragments,
         .low = 1, .high = 32},
        {"outer-delay", "steps that go on meanwhile", .whole = &s->outer_delay, .high = 1e9},
        {"micro-batches", "parts of a batch that go through the stages one after the other",
         .whole = &s->micro_batches, .low = 1, .high = 1e5},
        {"stages", "layers of each stage, such as 2,3; else equally many", .string = &s->stages},
        {"balance", "shares of the ranks of tp, as 2,1; auto: measured", .string = &s->balance},
        {"threads", "threads of each rank, where the compiler has OpenMP; 0: chosen with --ranks",
         .whole = &s->threads, .high = 1024},
        {"sequence-parallel", "cut the residual, norms and dropout along the sequence, too",
         .on = &s->sequence_parallel},
        {"checkpoint", "compute every block again in backward, for less memory",
         .on = &s->checkpoint},
        {"policy", "shard the blocks by the policy of this family: gpt2", .string = &s->policy},
        {"layers", "transformer blocks", .whole = &s->layers, .low = 1, .high = 1000},
        {"heads", "attention heads", .whole = &s->heads, .low = 1, .high = 1000},
        {"width", "features per token", .whole = &s->width, .low = 1, .high = 100000},
        {"context", "tokens that the model sees", .whole = &s->context, .low = 1, .high = 1e6},
        {"vocabulary", "tokens that the model could tell apart; 0: those of the text",
         .whole = &s->vocabulary, .high = 1e7},
        {"batch", "texts per step", .whole = &s->batch, .low = 1, .high = 1e5},
        {"steps", "steps of the optimiser", .whole = &s->steps, .low = 1, .high = 1e9},
        {"lr", "learning rate at its highest", .real = &s->lr, .low = 1e-12, .high = 1e3},
        {"dropout", "probability", .real = &s->dropout, .high = 0.99},
        {"seed", "of weights, batches, dropout and sample", .whole = &s->seed, .high = 1e15},
        {"eval-every", "steps between evaluations", .whole = &s->eval_every, .low = 1, .high = 1e9},
        {"out", "folder of metrics.csv and loss.svg", .string = &s->out},
        {"save", "folder of the run's state, from which it can go on", .string = &s->save},
        {"save-every", "steps between saves; also at the end, and on SIGINT and SIGTERM",
         .whole = &s->save_every, .low = 1, .high = 1e9},
        {"resume", "go on from the state in --save, where there is one", .on = &s->resume},
        {"trace", "file of what every rank did when: for ui.perfetto.dev", .string = &s->trace},
        {"sample", "characters to write at the end", .whole = &s->sample, .high = 1e6},
        {"help", "this list", .on = help},
    };
    memcpy(flags, list, sizeof list);
}

static void print_help(const gpt_flag *flags) {
    printf("Trains a GPT on a text file, tensor-parallel on threads or processes.\n\n");
    for (int i = 0; i < FLAGS; i++) {
        const gpt_flag *f = &flags[i];
        char name[32];
        const char *value = f->string != NULL ? " NAME" : f->on == NULL ? " N" : "";
        snprintf(name, sizeof name, "--%s%s", f->name, value);
        printf("  %-20s %s", name, f->help);
        if (f->whole != NULL) printf(" [%lld]", (long long)*f->whole);
        if (f->real != NULL) printf(" [%g]", *f->real);
        if (f->string != NULL && *f->string != NULL) printf(" [%s]", *f->string);
        printf("\n");
    }
}

static int set_flag(const gpt_flag *f, const char *value) {
    char *end = NULL;
    double number = 0;
    if (f->string != NULL) {
        *f->string = value;
        return 0;
    }
    errno = 0;
    if (f->whole != NULL) number = (double)strtoll(value, &end, 10);
    if (f->real != NULL) number = strtod(value, &end);
    if (errno != 0 || end == value || *end != '\0' || !(number >= f->low && number <= f->high))
        return refuse("--%s takes a %snumber from %.15g to %.15g, not '%s'", f->name,
                      f->whole != NULL ? "whole " : "", f->low, f->high, value);
    if (f->whole != NULL) *f->whole = (int64_t)number;
    if (f->real != NULL) *f->real = number;
    return 0;
}

/* --flag value or --flag=value. */
static int parse_flags(const gpt_flag *flags, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        size_t length = strcspn(argv[i], "=");
        const char *value = argv[i][length] == '=' ? argv[i] + length + 1 : NULL;
        const gpt_flag *f = NULL;
        for (int j = 0; j < FLAGS && strncmp(argv[i], "--", 2) == 0; j++)
            if (strlen(flags[j].name) + 2 == length &&
                strncmp(flags[j].name, argv[i] + 2, length - 2) == 0)
                f = &flags[j];
        if (f == NULL) return refuse("unknown flag '%s'; --help lists the known ones", argv[i]);
        if (f->on != NULL && value != NULL) return refuse("--%s takes no value", f->name);
        if (f->on != NULL) {
            *f->on = 1;
            continue;
        }
        if (value == NULL && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) value = argv[++i];
        if (value == NULL || *value == '\0') return refuse("--%s needs a value", f->name);
        int failed = set_flag(f, value);
        if (failed) return failed;
    }
    return 0;
}

static int check_gemm(const gpt_settings *s) {
    if (strcmp(s->gemm, "builtin") == 0) return 0;
    if (strcmp(s->gemm, "blis") != 0) return refuse("--gemm is builtin or blis, not '%s'", s->gemm);
#ifdef GPT_BLIS
    return 0;
#else
    return refuse("built without BLIS: install libblis-pthread-dev, and build gpt again");
#endif
}

static int check_dtype(const gpt_settings *s) {
    if (strcmp(s->dtype, "f32") == 0 || strcmp(s->dtype, "bf16") == 0) return 0;
    return refuse("--dtype is f32 or bf16, not '%s'", s->dtype);
}

/* Weights are quantised by blocks of 32 input features. */
static int check_weights(const gpt_settings *s) {
    if (s->weights == NULL) return 0;
    if (strcmp(s->weights, "q8_0") != 0 && strcmp(s->weights, "q4_0") != 0)
        return refuse("--weights is q8_0 or q4_0, not '%s'", s->weights);
    if (s->width % 32 == 0) return 0;
    return refuse("--weights %s takes a --width that is a multiple of 32, not %lld", s->weights,
                  (long long)s->width);
}

static int check_backend(gpt_settings *s) {
    s->joins = strcmp(s->backend, "tcp") == 0 || strcmp(s->backend, "mpi") == 0;
    if (s->joins || strcmp(s->backend, "threads") == 0) return 0;
    return refuse("--backend is threads, tcp or mpi, not '%s'", s->backend);
}

/* "2,3": layers of stage 0, stage 1. */
static int check_stages(gpt_settings *s) {
    const char *at = s->stages;
    int64_t count = 0, sum = 0;
    if (at == NULL && s->layers % s->pp != 0)
        return refuse("--layers %lld do not divide into --pp %lld stages: say --stages",
                      (long long)s->layers, (long long)s->pp);
    while (at != NULL && count < s->pp) {
        char *end = NULL;
        long layers = strtol(at, &end, 10);
        if (end == at || layers < 1 || layers > s->layers) break;
        s->counts[count++] = (int)layers;
        sum += layers;
        at = end + (*end == ',');
        if (*end != ',') break;
    }
    if (s->stages == NULL || (*at == '\0' && count == s->pp && sum == s->layers)) return 0;
    return refuse("--stages %s is no list of %lld numbers that add up to --layers %lld", s->stages,
                  (long long)s->pp, (long long)s->layers);
}

static int check_balance(gpt_settings *s) {
    if (s->balance == NULL || strcmp(s->balance, "auto") == 0) return 0;
    if (balance_parse(s->balance, (int)s->tp, s->shares)) return 0;
    return refuse("--balance is auto, or numbers from 1 for the ranks of --tp %lld, such as 2,1, "
                  "not '%s'",
                  (long long)s->tp, s->balance);
}

/* Chooses the number of ranks, and of threads of each, where flags leave them open. The ranks of tp
 * are chosen for the cores that pp and dp leave to them. */
static void choose_ranks(gpt_settings *s, int cores, int64_t others) {
    const cores_model model = {s->heads, s->heads, 1};
    const int64_t given = s->threads > 0 ? s->threads : 1;
    const cores_choice best = cores_choose(&model, (int)(cores / others / given),
                                           (int)(MAX_RANKS / others),
                                           s->threads > 0 ? 1 : CORES_THREADS);
    s->chosen = s->ranks == 0 && s->tp == 0;
    if (s->ranks == 0) s->ranks = (s->chosen ? best.ranks : s->tp) * others;
    if (s->threads == 0) s->threads = s->chosen ? best.threads : 1;
}

/* The dtype that --wire or --outer-wire names; TSH_DTYPE_DEFAULT where it names none, or is not
 * given. */
static tsh_dtype wire_dtype(const char *name) {
    static const char *const names[] = {"f32", "bf16", "q8_0", "q4_0"};
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16, TSH_Q8_0, TSH_Q4_0};
    for (int i = 0; i < 4 && name != NULL; i++)
        if (strcmp(name, names[i]) == 0) return dtypes[i];
    return TSH_DTYPE_DEFAULT;
}

static int check_outer(const gpt_settings *s) {
    const tsh_dtype wire = wire_dtype(s->wire);
    if (s->wire != NULL && (wire == TSH_DTYPE_DEFAULT || wire == TSH_F32))
        return refuse("--wire is bf16, q8_0 or q4_0, not '%s'", s->wire);
    if (s->outer_wire != NULL && wire_dtype(s->outer_wire) == TSH_DTYPE_DEFAULT)
        return refuse("--outer-wire is f32, bf16, q8_0 or q4_0, not '%s'", s->outer_wire);
    if (s->outer > 0 && s->zero)
        return refuse("--outer gives each copy moments of its own, which --zero would cut; leave "
                      "one of the two out");
    if (s->outer > 0 && (s->outer_fragments > s->outer || s->outer_delay >= s->outer))
        return refuse("--outer %lld is less than --outer-fragments %lld, or not above "
                      "--outer-delay %lld",
                      (long long)s->outer, (long long)s->outer_fragments,
                      (long long)s->outer_delay);
    return 0;
}

static int check_settings(gpt_settings *s, int cores) {
    int64_t others = s->pp * (s->dp > 0 ? s->dp : 1);
    if (check_dtype(s) != 0 || check_weights(s) != 0) return BAD_USE;
    choose_ranks(s, cores, others);
    if (s->ranks > MAX_RANKS)
        return refuse("%lld ranks are more than %d", (long long)s->ranks, MAX_RANKS);
    if (s->tp == 0) s->tp = s->ranks % others == 0 ? s->ranks / others : 1;
    if (s->dp == 0) s->dp = s->ranks / (s->tp * s->pp);
    if (s->ranks != s->tp * s->pp * s->dp)
        return refuse("--ranks %lld is not --tp %lld times --pp %lld times --dp %lld",
                      (long long)s->ranks, (long long)s->tp, (long long)s->pp, (long long)s->dp);
    if (s->batch < s->dp * s->micro_batches)
        return refuse("--batch %lld is less than --dp %lld times --micro-batches %lld",
                      (long long)s->batch, (long long)s->dp, (long long)s->micro_batches);
    if (check_stages(s) != 0 || check_outer(s) != 0 || check_balance(s) != 0) return BAD_USE;
    if (s->policy != NULL && tsh_policy_find(s->policy) == NULL)
        return refuse("--policy '%s' is not a family that has one, such as gpt2", s->policy);
    if (s->policy != NULL && s->sequence_parallel)
        return refuse("--policy %s has no sequence-parallel form; leave one of the two out",
                      s->policy);
    if (s->resume && s->save == NULL)
        return refuse("--resume needs the folder of the state: --save DIR");
    if (s->width % s->heads != 0)
        return refuse("--width %lld is not a multiple of --heads %lld", (long long)s->width,
                      (long long)s->heads);
    return 0;
}

/* == the text ============================================================== */

typedef struct gpt_text {
    unsigned char *train, *val; /* tokens */
    int64_t train_size, val_size;
    int64_t vocabulary;
    unsigned char byte_of[256]; /* the byte that a token stands for */
} gpt_text;

static int append(unsigned char **to, int64_t *size, const unsigned char *from, int64_t count) {
    unsigned char *bigger = (unsigned char *)realloc(*to, (size_t)(*size + count) + 1);
    if (bigger == NULL) return refuse("no memory for a text of %lld bytes", (long long)*size);
    memcpy(bigger + *size, from, (size_t)count);
    *to = bigger;
    *size += count;
    return 0;
}

/* The first 90 % of every piece of a file are for training, the last 10 % for validation. */
static int add_file(gpt_text *t, const char *path, int64_t piece) {
    unsigned char *bytes = NULL, buffer[1 << 14];
    int64_t size = 0;
    int failed = 0;
    FILE *file = fopen(path, "rb");
    if (file == NULL) return refuse("cannot open the text %s: %s", path, strerror(errno));
    for (size_t n; !failed && (n = fread(buffer, 1, sizeof buffer, file)) > 0;)
        failed = append(&bytes, &size, buffer, (int64_t)n);
    if (!failed && ferror(file))
        failed = refuse("cannot read the text %s: %s", path, strerror(errno));
    fclose(file);
    if (!failed && size == 0) failed = refuse("the text %s is empty", path);
    for (int64_t at = 0, n = piece; at < size && !failed; at += n) {
        if (n > size - at) n = size - at;
        failed = append(&t->train, &t->train_size, bytes + at, n * 9 / 10);
        if (!failed)
            failed = append(&t->val, &t->val_size, bytes + at + n * 9 / 10, n - n * 9 / 10);
    }
    free(bytes);
    return failed;
}

/* The sources of this project: from the working directory, or from where this file was compiled. In
 * pieces, since a source's end is not like the rest of it. */
static int add_sources(gpt_text *t) {
    static const char *const patterns[] = {"tshard.h", "backends/*.h", "examples/*.[ch]"};
    const char *slash = strrchr(__FILE__, '/');
    char root[1024] = ".", path[1200];
    int failed = 0;
    if (access("tshard.h", R_OK) != 0)
        snprintf(root, sizeof root, "%.*s..", slash == NULL ? 0 : (int)(slash + 1 - __FILE__),
                 __FILE__);
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns && !failed; i++) {
        glob_t found;
        snprintf(path, sizeof path, "%s/%s", root, patterns[i]);
        int none = glob(path, 0, NULL, &found);
        if (none && i == 0)
            return refuse("no tshard.h in . or %s to learn from: give a file with --text", root);
        for (size_t j = 0; !none && j < found.gl_pathc && !failed; j++)
            failed = add_file(t, found.gl_pathv[j], 1 << 15);
        if (!none) globfree(&found);
    }
    return failed;
}

/* Tokens are bytes; or, with --chars, the distinct bytes of the text, sorted and numbered. */
static void make_tokens(gpt_text *t, int chars) {
    unsigned char token_of[256];
    int seen[256] = {0};
    for (int64_t i = 0; i < t->train_size; i++) seen[t->train[i]] = 1;
    for (int64_t i = 0; i < t->val_size; i++) seen[t->val[i]] = 1;
    for (int byte = 0; byte < 256; byte++) {
        if (chars && !seen[byte]) continue;
        token_of[byte] = (unsigned char)t->vocabulary;
        t->byte_of[t->vocabulary++] = (unsigned char)byte;
    }
    for (int64_t i = 0; i < t->train_size; i++) t->train[i] = token_of[t->train[i]];
    for (int64_t i = 0; i < t->val_size; i++) t->val[i] = token_of[t->val[i]];
}

static int load_text(gpt_text *t, const gpt_settings *set) {
    memset(t, 0, sizeof *t);
    int failed = set->text != NULL ? add_file(t, set->text, INT64_MAX) : add_sources(t);
    if (failed) return failed;
    if (t->train_size <= set->context || t->val_size <= set->context)
        return refuse("the text has %lld bytes for training and %lld for validation: too short for "
                      "--context %lld, which takes %lld of each",
                      (long long)t->train_size, (long long)t->val_size, (long long)set->context,
                      (long long)set->context + 1);
    make_tokens(t, set->chars);
    if (set->vocabulary && set->vocabulary < t->vocabulary)
        return refuse("--vocabulary %lld is less than the %lld tokens of the text",
                      (long long)set->vocabulary, (long long)t->vocabulary);
    return 0;
}

#endif /* GPT_SETUP_H */
