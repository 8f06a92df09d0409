/* llm.c - runs a language model from the Hugging Face hub, tensor-parallel on threads, or on
 * processes over TCP
 *
 *   build/llm --model DIR --prompt "Once upon a time"     continues a text; --temperature 1 samples
 *   build/llm --model DIR --ids "1 2 3" --print-ids       continues these tokens
 *   build/llm --model DIR --ids "1 2 3" --dump-logits F   and writes the logits of each
 *   build/llm --model DIR --tokenize <FILE                writes a text as tokens
 *   build/llm --help                                      tells every flag
 *
 * README.md beside this file lists the models. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* sysconf */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#ifdef LLM_TCP
#include "../../backends/tshard_uv.h"
#endif
#include "model.h"
#include "text.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

enum { LLM_CHUNK = 256 }; /* tokens of a prompt that are computed at once */

/* What all ranks of this process share. Only rank 0 writes to it, but for the error. */
typedef struct llm_job {
    const char *model, *prompt_text, *ids, *dump, *backend, *dtype, *weights; /* NULL: not given */
    const char *tokenizer_file, *embed;
    int64_t tp, max_new, threads;
    int print_ids, greedy, ignore_eos, tokenize, detokenize, no_special;
    int64_t top_k, seed;
    double temperature, top_p, min_p, penalty; /* 0: not given */
    text_codec codec;
    llm_config config;
    const llm_family *family;
    int32_t *tokens; /* the prompt */
    int64_t prompt, count;
    int64_t *ends, lines; /* --embed: tokens before the end of each line */
    int first_token, plain; /* --embed: the first token's vector, not the mean; any length */
    tsh_comm comm; /* TCP: this process's place in the world */
    pthread_mutex_t lock;
    char error[TSH_MESSAGE_SIZE];
} llm_job;

/* -- flags ------------------------------------------------------------------ */

typedef struct llm_flag_row {
    const char *name, *help;
    const char **text;
    int64_t *number;
    int *on;
    double *real;
} llm_flag_row;

static void print_flags(const llm_flag_row *flags, int n, FILE *file) {
    fprintf(file, "usage: llm --model DIR --prompt \"Once upon a time\" ...\n");
    for (int i = 0; i < n; i++)
        fprintf(file, "  --%s%-*s %s\n", flags[i].name, 19 - (int)strlen(flags[i].name),
                flags[i].text ? " TEXT" : flags[i].number ? " N" : flags[i].real ? " X" : "",
                flags[i].help);
}

/* Prints a sentence, returns 2. */
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

static int parse_flag(const llm_flag_row *flag, const char *value) {
    char *end;
    if (flag->on) {
        *flag->on = 1;
        return 0;
    }
    if (!value) return usage("--%s needs a value", flag->name);
    if (flag->text) {
        *flag->text = value;
        return 0;
    }
    errno = 0;
    if (flag->real) {
        *flag->real = strtod(value, &end);
        if (*end || end == value || errno || !(*flag->real > 0) || *flag->real > 1e6)
            return usage("--%s takes a number above 0", flag->name);
        return 0;
    }
    const long long number = strtoll(value, &end, 10);
    if (*end || end == value || errno || number < 0 || number > 1000000000)
        return usage("--%s takes a whole number", flag->name);
    *flag->number = number;
    return 0;
}

/* 0, 2 after a mistake, or -1 if help was all that was asked for. */
static int parse(llm_job *job, int argc, char **argv) {
    int help = 0;
    const llm_flag_row flags[] = {
        {"model", "the folder: config.json and model.safetensors", &job->model, NULL, NULL, NULL},
        {"prompt", "the text to continue", &job->prompt_text, NULL, NULL, NULL},
        {"ids", "the same as numbers of tokens", &job->ids, NULL, NULL, NULL},
        {"max-new", "how many tokens to generate (64)", NULL, &job->max_new, NULL, NULL},
        {"greedy", "take the most likely token, which is the default", NULL, NULL, &job->greedy,
         NULL},
        {"temperature", "sample: divides the logits", NULL, NULL, NULL, &job->temperature},
        {"top-k", "sample: of the N most likely tokens", NULL, &job->top_k, NULL, NULL},
        {"top-p", "sample: of the most likely ones whose sum is X", NULL, NULL, NULL, &job->top_p},
        {"min-p", "sample: of those with X times the largest probability", NULL, NULL, NULL,
         &job->min_p},
        {"repetition-penalty", "divides the logits of tokens that were", NULL, NULL, NULL,
         &job->penalty},
        {"seed", "sample: another text for each number", NULL, &job->seed, NULL, NULL},
        {"print-ids", "print tokens as numbers", NULL, NULL, &job->print_ids, NULL},
        {"ignore-eos", "go on after the end of the text", NULL, NULL, &job->ignore_eos, NULL},
        {"dump-logits", "write the logits of the prompt to this file", &job->dump, NULL, NULL,
         NULL},
        {"tp", "ranks, as threads (one per core)", NULL, &job->tp, NULL, NULL},
        {"threads", "cores of each rank (1)", NULL, &job->threads, NULL, NULL},
        {"backend", "threads, or tcp: a process per rank, by tshard-run", &job->backend, NULL,
         NULL, NULL},
        {"dtype", "f32, bf16 or f16; else that of config.json", &job->dtype, NULL, NULL, NULL},
        {"weights", "q8_0 or q4_0: of 8 or 4 bits", &job->weights, NULL, NULL, NULL},
        {"embed", "write a vector for each line of this file", &job->embed, NULL, NULL, NULL},
        {"tokenize", "write the text on stdin as one line of tokens", NULL, NULL, &job->tokenize,
         NULL},
        {"detokenize", "write the tokens on stdin as text", NULL, NULL, &job->detokenize, NULL},
        {"no-special", "without tokens that begin or end a text", NULL, NULL, &job->no_special,
         NULL},
        {"tokenizer", "a tokenizer.json; else that of the model", &job->tokenizer_file, NULL,
         NULL, NULL},
        {"help", "this list", NULL, NULL, &help, NULL}};
    const int n = (int)(sizeof flags / sizeof *flags);
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

/* "f32" ... as a dtype; 0: none of those. */
static tsh_dtype dtype_named(const char *name) {
    static const char *const names[] = {"f32", "bf16", "f16", "q8_0", "q4_0"};
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16, TSH_F16, TSH_Q8_0, TSH_Q4_0};
    for (int i = 0; i < 5; i++)
        if (strcmp(names[i], name) == 0) return dtypes[i];
    return TSH_DTYPE_DEFAULT;
}

static int check_flags(llm_job *job) {
    const tsh_dtype weights = job->weights ? dtype_named(job->weights) : TSH_Q8_0;
    const tsh_dtype dtype = job->dtype ? dtype_named(job->dtype) : TSH_F32;
    const int converts = job->tokenize || job->detokenize;
    if (!job->model && !(converts && job->tokenizer_file)) return usage("--model is missing");
    if (job->tokenize && job->detokenize) return usage("--tokenize and --detokenize are two runs");
    if (!converts && !job->embed && !job->ids == !job->prompt_text)
        return usage("give one of --prompt and --ids, or --embed");
    if (weights != TSH_Q8_0 && weights != TSH_Q4_0)
        return usage("--weights is q8_0 or q4_0, not '%s'", job->weights);
    if (!dtype || dtype == TSH_Q8_0 || dtype == TSH_Q4_0)
        return usage("--dtype is f32, bf16 or f16, not '%s'", job->dtype);
    if (strcmp(job->backend, "threads") != 0 && strcmp(job->backend, "tcp") != 0)
        return usage("--backend is threads or tcp, not '%s'", job->backend);
    return 0;
}

/* -- refusals --------------------------------------------------------------- */

/* Keeps the first sentence, of whatever rank. Returns 1. */
TSH_PRINTF(2, 3)
static int refuse(llm_job *job, const char *format, ...) {
    va_list list;
    pthread_mutex_lock(&job->lock);
    va_start(list, format);
    if (!job->error[0]) vsnprintf(job->error, sizeof job->error, format, list);
    va_end(list);
    pthread_mutex_unlock(&job->lock);
    return 1;
}

/* Of the library: an error is kept, a warning is printed. */
static void heed(void *user, const char *message) {
    const char *warning = strstr(message, "warning: ");
    if (warning) fprintf(stderr, "llm: %s\n", message);
    else refuse((llm_job *)user, "%s", message);
}

/* -- the prompt ------------------------------------------------------------- */

/* All of stdin, with a 0 at the end; NULL: refused. */
static char *read_stdin(llm_job *job, size_t *length) {
    size_t room = 1 << 16, n = 0, got;
    char *text = (char *)malloc(room), *more;
    while (text && (got = fread(text + n, 1, room - 1 - n, stdin)) > 0) {
        n += got;
        if (n + 1 < room) continue;
        more = (char *)realloc(text, room *= 2);
        if (!more) free(text);
        text = more;
    }
    if (!text) refuse(job, "not enough memory");
    else text[n] = 0;
    *length = n;
    return text;
}

/* --prompt; 0: refused. */
static int read_prompt(llm_job *job) {
    int32_t *ids = NULL;
    const int64_t n = text_encode(&job->codec, job->prompt_text, strlen(job->prompt_text),
                                   !job->no_special, &ids);
    if (n < 0) return !refuse(job, "%s", job->codec.error);
    job->tokens = ids;
    if (n == 0) return !refuse(job, "--prompt has no token");
    job->count = job->prompt = n;
    return 1;
}

/* Numbers between blanks, each less than `vocabulary`; 0: refused. */
static int read_ids(llm_job *job, const char *at, int64_t vocabulary) {
    job->tokens = (int32_t *)malloc((strlen(at) / 2 + 2) * sizeof *job->tokens);
    while (job->tokens) {
        char *end;
        at += strspn(at, " ,\t\r\n");
        if (!*at) break;
        const long long id = strtoll(at, &end, 10);
        if (end == at) return !refuse(job, "--ids: \"%.20s\" is not a number", at);
        if (id < 0 || id >= vocabulary)
            return !refuse(job, "--ids: %lld is not one of the model's %lld tokens", id,
                          (long long)vocabulary);
        job->tokens[job->count++] = (int32_t)id;
        at = end;
    }
    if (!job->tokens) return !refuse(job, "not enough memory");
    if (job->count == 0) return !refuse(job, "--ids has no token");
    job->prompt = job->count;
    return 1;
}

/* --tokenize and --detokenize. */
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
        if (ok && !text_print(&job->codec, job->tokens, (size_t)job->count))
            ok = !refuse(job, "%s", job->codec.error);
    }
    free(text);
    return !ok;
}

/* 0: the text may become longer than the model takes. */
static int check_length(llm_job *job) {
    const char *why = "";
    const int64_t most = llm_longest(&job->config, &why), n = job->prompt + job->max_new;
    if (!most || n <= most) return 1;
    return !refuse(job, "%lld tokens of the prompt and %lld new ones are more than %lld: %s",
                  (long long)job->prompt, (long long)job->max_new, (long long)most, why);
}

/* -- generating, on every rank ----------------------------------------------- */

/* One rank's values. */
typedef struct llm_rank {
    llm_job *job;
    tsh_ctx *ctx;
    llm_net model;
    FILE *dump;
    float *row; /* of --dump-logits: the logits of a token; of an encoder its vector */
    int64_t columns;
    int32_t *tokens; /* the prompt, then what is generated; NULL: generates nothing */
    int64_t count;
} llm_rank;

/* Row t of the logits, on every rank. 0: an error. */
static int read_row(llm_rank *r, tsh_tensor *logits, int64_t t) {
    tsh_tensor *row = tsh_slice(tsh_cast(logits, TSH_F32), 1, t, 1);
    const size_t bytes = (size_t)r->columns * sizeof *r->row;
    return tsh_read(r->ctx, row, TSH_GLOBAL, r->row, bytes) == TSH_OK;
}

/* Appends the token that follows the last row of the logits: the most likely one, or a drawn one,
 * the same on every rank. */
static void choose(llm_rank *r, tsh_tensor *logits) {
    const llm_job *job = r->job;
    const int draws = job->temperature > 0 || job->top_k > 0 || job->top_p > 0 || job->min_p > 0 ||
                      job->seed > 0;
    tsh_sample_desc desc = {.penalty = job->penalty,
                            .temperature = job->temperature,
                            .top_k = job->top_k,
                            .top_p = job->top_p,
                            .min_p = job->min_p,
                            .seed = (uint64_t)job->seed,
                            .position = r->count};
    tsh_tensor *row = tsh_slice(logits, 1, tsh_dim(logits, 1) - 1, 1), *id;
    int64_t token = 0;
    if (job->penalty > 0)
        desc.previous = tsh_tensor_from(r->ctx, TSH_I32, tsh_shape3(1, 1, r->count), NULL,
                                        r->tokens);
    if (!draws || job->greedy) desc.temperature = TSH_ZERO;
    id = job->penalty > 0 || draws ? tsh_sample(row, &desc) : tsh_argmax(row, -1, 0);
    if (tsh_read(r->ctx, id, TSH_GLOBAL, &token, sizeof token) == TSH_OK)
        r->tokens[r->count++] = (int32_t)token;
    if (desc.previous) tsh_tensor_free(desc.previous);
}

/* Opens the file of --dump-logits and writes its header. */
static int dump_open(llm_rank *r) {
    const llm_job *job = r->job;
    const long long rows = job->prompt, columns = r->columns;
    char header[256];
    unsigned char size[8];
    r->dump = fopen(job->dump, "wb");
    if (!r->dump) return !refuse(r->job, "%s: %s", job->dump, strerror(errno));
    snprintf(header, sizeof header - 8,
             "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%lld,%lld],\"data_offsets\":[0,%lld]}}",
             rows, columns, rows * columns * 4);
    while (strlen(header) % 8) strcat(header, " ");
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)(strlen(header) >> (8 * i));
    fwrite(size, 1, 8, r->dump);
    fwrite(header, 1, strlen(header), r->dump);
    return 1;
}

/* Computes the prompt, and chooses the first token after it. */
static int prefill(llm_rank *r) {
    llm_job *job = r->job;
    const int writes = job->dump && tsh_world(r->ctx)->rank == 0;
    if (writes && !dump_open(r)) return 0;
    r->model.all = job->dump != NULL;
    const int64_t chunk = job->config.encoder ? job->prompt : LLM_CHUNK;
    for (int64_t at = 0; at < job->prompt && tsh_ok(r->ctx); at += chunk) {
        const int64_t n = job->prompt - at < chunk ? job->prompt - at : chunk;
        tsh_scope_begin(r->ctx);
        tsh_tensor *logits = llm_logits(&r->model, job->tokens + at, n);
        const int64_t rows = logits ? tsh_dim(logits, 1) : 0;
        for (int64_t t = 0; job->dump && t < rows && read_row(r, logits, t); t++)
            if (writes) fwrite(r->row, 4, (size_t)r->columns, r->dump);
        if (logits && r->tokens && at + n == job->prompt) choose(r, logits);
        tsh_scope_end(r->ctx);
    }
    r->model.all = 0;
    const int bad = writes && (ferror(r->dump) | fclose(r->dump));
    if (bad) refuse(job, "%s: cannot be written", job->dump);
    return tsh_ok(r->ctx) && !bad;
}

static int ends(const llm_job *job, int32_t id) {
    for (int i = 0; i < job->config.eos_count && !job->ignore_eos; i++)
        if (job->config.eos[i] == id) return 1;
    return 0;
}

/* How fast it was: to stderr, beside a text. */
static void tell_speed(const llm_rank *r, int64_t start, int64_t first, int64_t end) {
    const llm_job *job = r->job;
    const int64_t more = r->count - job->prompt - 1;
    fprintf(stderr, "llm: first token after %.2f s (prompt: %lld tokens)",
            1e-9 * (double)(first - start), (long long)job->prompt);
    if (more > 0)
        fprintf(stderr, "; then %.1f tokens/s", 1e9 * (double)more / (double)(end - first));
    fprintf(stderr, "\n");
}

/* Writes tokens until the end of the text, or max_new. start: when the prompt was begun. */
static void generate(llm_rank *r, int64_t start) {
    llm_job *job = r->job;
    const int first = tsh_world(r->ctx)->rank == 0;
    const int64_t prompt = tsh_now();
    for (int64_t i = 0; i < job->max_new && tsh_ok(r->ctx); i++) {
        const int32_t id = r->tokens[job->prompt + i];
        if (ends(job, id)) break;
        if (first && job->print_ids) printf("%s%d", i ? " " : "", (int)id);
        if (first && !job->print_ids) text_say(&job->codec, id, 0);
        if (first) fflush(stdout);
        if (i + 1 == job->max_new) break;
        tsh_scope_begin(r->ctx);
        tsh_tensor *logits = llm_logits(&r->model, &id, 1);
        if (logits) choose(r, logits);
        tsh_scope_end(r->ctx);
    }
    if (first && !job->print_ids) text_say(&job->codec, 0, 1);
    if (first && tsh_ok(r->ctx)) printf("\n");
    if (first && tsh_ok(r->ctx) && !job->print_ids) tell_speed(r, start, prompt, tsh_now());
}

/* --embed: a line of numbers per line of the file. */
static void embed(llm_rank *r) {
    const llm_job *job = r->job;
    int64_t at = 0;
    for (int64_t i = 0; i < job->lines && tsh_ok(r->ctx); at = job->ends[i++]) {
        double square = 0;
        tsh_scope_begin(r->ctx);
        r->model.past = 0;
        tsh_tensor *x = llm_logits(&r->model, job->tokens + at, job->ends[i] - at);
        if (x && !job->first_token) x = tsh_mean(tsh_cast(x, TSH_F32), 1, 1);
        const int ok = x && read_row(r, x, 0);
        tsh_scope_end(r->ctx);
        if (!ok || tsh_world(r->ctx)->rank > 0) continue;
        for (int64_t k = 0; k < r->columns; k++) square += (double)r->row[k] * (double)r->row[k];
        const double scale = job->plain || square == 0 ? 1 : 1 / sqrt(square);
        for (int64_t k = 0; k < r->columns; k++)
            printf("%s%.9g", k ? " " : "", (double)r->row[k] * scale);
        printf("\n");
    }
}

static int run_rank(tsh_ctx *ctx, void *user) {
    llm_job *job = (llm_job *)user;
    llm_rank *r = (llm_rank *)calloc(1, sizeof *r);
    const tsh_dtype weights = job->weights ? dtype_named(job->weights) : TSH_DTYPE_DEFAULT;
    const int64_t columns = job->config.encoder ? job->config.width : job->config.vocabulary;
    float *row = (float *)malloc((size_t)columns * sizeof *row);
    int32_t *tokens = (int32_t *)malloc((size_t)(job->prompt + job->max_new + 1) * sizeof *tokens);
    if (!r || !row || !tokens) {
        tsh_fail(ctx, TSH_ERR_MEMORY, "not enough memory");
    } else {
        r->job = job;
        r->ctx = ctx;
        r->row = row;
        if (job->prompt) memcpy(tokens, job->tokens, (size_t)job->prompt * sizeof *tokens);
        r->tokens = job->max_new > 0 && !job->embed ? tokens : NULL;
        r->count = job->prompt;
        r->columns = columns;
        tsh_no_grad_begin(ctx);
        llm_model_load(&r->model, ctx, &job->config, job->family, job->model,
                       job->prompt + job->max_new, weights);
        const int64_t start = tsh_now();
        if (tsh_ok(ctx) && job->embed) embed(r);
        else if (tsh_ok(ctx) && prefill(r) && r->tokens) generate(r, start);
        tsh_no_grad_end(ctx);
    }
    free(tokens);
    free(row);
    free(r);
    return !tsh_ok(ctx);
}

/* -- main ------------------------------------------------------------------- */

static int join_tcp(llm_job *job) {
#ifdef LLM_TCP
    tsh_error why;
    const tsh_uv_desc uv = {.error = &why};
    if (tsh_uv_open(&uv, &job->comm) != TSH_OK) return !refuse(job, "%s", why.message);
    return 1;
#else
    return !refuse(job, "built without TCP: install libuv1-dev and libsodium-dev, and build llm "
                        "again");
#endif
}

static int run(llm_job *job) {
    tsh_desc desc = {.threads = (int)job->threads, .logger = {heed, job}};
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int tp = (int)(job->tp ? job->tp : cores > 0 ? cores : 1);
    desc.dtype = job->dtype ? dtype_named(job->dtype) : job->config.dtype;
    if (strcmp(job->backend, "threads") == 0) return tsh_threads_run(tp, &desc, run_rank, job);
    if (!join_tcp(job)) return 1;
    desc.comm = job->comm;
    return tsh_run(&desc, run_rank, job);
}

static int open_codec(llm_job *job) {
    if (text_open(&job->codec, job->tokenizer_file, job->model)) return 1;
    return !refuse(job, "%s", job->codec.error);
}

static int convert_text(llm_job *job) {
    return !open_codec(job) || convert(job);
}

/* How sentence-transformers makes one vector of a text: 1_Pooling says which, modules.json whether
 * it gets length 1. Without them: the mean, of length 1. 0: refused. */
static int read_pooling(llm_job *job) {
    char *text = llm_read_file(job->model, "1_Pooling/config.json");
    cJSON *pooling = text ? cJSON_Parse(text) : NULL;
    const cJSON *item;
    int known = 1;
    cJSON_ArrayForEach(item, pooling) {
        if (!cJSON_IsTrue(item) || strncmp(item->string, "pooling_mode_", 13) != 0) continue;
        job->first_token = strcmp(item->string, "pooling_mode_cls_token") == 0;
        if (!job->first_token && strcmp(item->string, "pooling_mode_mean_tokens") != 0)
            known = !refuse(job, "1_Pooling/config.json: %.60s is not supported", item->string);
    }
    cJSON_Delete(pooling);
    free(text);
    text = llm_read_file(job->model, "modules.json");
    job->plain = text != NULL && strstr(text, "Normalize") == NULL;
    free(text);
    return known;
}

/* Appends a line's tokens. 0: refused. */
static int read_line(llm_job *job, const char *line, size_t length) {
    int32_t *ids = NULL;
    const int64_t n = text_encode(&job->codec, line, length, !job->no_special, &ids);
    const int64_t most = job->config.places;
    int32_t *tokens = NULL;
    int64_t *ends = NULL;
    if (n < 0) return !refuse(job, "%s", job->codec.error);
    if (n == 0 || n > most)
        refuse(job, "%s: line %lld has %lld tokens, not 1 to %lld", job->embed,
               (long long)job->lines + 1, (long long)n, (long long)most);
    else
        tokens = (int32_t *)realloc(job->tokens, (size_t)(job->count + n) * sizeof *tokens);
    if (tokens) job->tokens = tokens;
    if (tokens) ends = (int64_t *)realloc(job->ends, (size_t)(job->lines + 1) * sizeof *ends);
    if (ends) job->ends = ends;
    if (ends) memcpy(tokens + job->count, ids, (size_t)n * sizeof *ids);
    free(ids);
    if (!ends) return !refuse(job, "not enough memory");
    job->ends[job->lines++] = job->count += n;
    return 1;
}

/* --embed. */
static int embed_lines(llm_job *job) {
    char *text = llm_read_file("", job->embed);
    int ok = text != NULL;
    if (!job->config.encoder) {
        free(text);
        return refuse(job, "--embed takes an encoder, such as bert, not %s", job->config.type);
    }
    if (!ok) return refuse(job, "%s: %s", job->embed, strerror(errno));
    for (const char *line = text; ok && *line;) {
        const size_t n = strcspn(line, "\n");
        ok = read_line(job, line, n);
        line += line[n] ? n + 1 : n;
    }
    free(text);
    return !ok || !read_pooling(job) || run(job) != 0 || job->error[0] != 0;
}

static int continue_text(llm_job *job) {
    llm_config *c = &job->config;
    if (!llm_config_read(c, job->model, &job->family)) return refuse(job, "%s", c->error);
    if ((job->embed || job->prompt_text || !job->print_ids) && !open_codec(job)) return 1;
    if (job->codec.tokenizer && text_count(&job->codec) > c->vocabulary)
        return refuse(job, "the tokenizer has %lld tokens, the model %lld",
                      (long long)text_count(&job->codec), (long long)c->vocabulary);
    if (job->embed) return embed_lines(job);
    if (c->encoder && job->max_new > 0)
        return refuse(job, "%s generates no text; give --embed FILE", c->type);
    if (!(job->prompt_text ? read_prompt(job) : read_ids(job, job->ids, c->vocabulary))) return 1;
    return !check_length(job) || run(job) != 0 || job->error[0] != 0;
}

int main(int argc, char **argv) {
    llm_job job = {.backend = "threads", .max_new = 64, .threads = 1};
    int failed = parse(&job, argc, argv);
    if (failed == 0) failed = check_flags(&job);
    if (failed != 0) return failed < 0 ? 0 : failed;
    pthread_mutex_init(&job.lock, NULL);
    failed = job.tokenize || job.detokenize ? convert_text(&job) : continue_text(&job);
    if (failed) fprintf(stderr, "llm: %s\n", job.error[0] ? job.error : "it did not end well");
    text_close(&job.codec);
    llm_config_free(&job.config);
    free(job.tokens);
    free(job.ends);
    pthread_mutex_destroy(&job.lock);
    return failed;
}
