/* gpt_state.h - how gpt.c stops, and goes on where it stopped
 *
 * --save DIR keeps two files. state.safetensors is what tsh_save writes: weights, AdamW's moments,
 * the random generators' state and the number of steps; it is always one complete state, the old or
 * the new one, even if the program is killed while it saves. settings.txt is what the run learns,
 * and how: a run with other settings cannot go on from this state. The next batch needs no file: it
 * follows from the seed and the step. */
#ifndef GPT_STATE_H
#define GPT_STATE_H

#include "gpt_report.h"
#include "gpt_setup.h"

#include <signal.h>

enum { STATE_PATH = 1200, STATE_SETTINGS = 1024 };

static void state_path(char path[STATE_PATH], const gpt_settings *set, const char *name) {
    snprintf(path, STATE_PATH, "%s/%s", set->save, name);
}

/* == settings.txt ========================================================== */

/* FNV-1a, 64 bits: tells one text from another. */
static uint64_t state_hash(uint64_t hash, const unsigned char *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* A line for each setting on which the losses depend, but for --steps: more may be asked for. */
static void state_describe(char text[STATE_SETTINGS], const gpt_settings *s, const gpt_text *t) {
    uint64_t hash = state_hash(UINT64_C(0xcbf29ce484222325), t->byte_of, sizeof t->byte_of);
    hash = state_hash(hash, t->train, t->train_size);
    hash = state_hash(hash, t->val, t->val_size);
    snprintf(text, STATE_SETTINGS,
             "text of %lld bytes, hash %016llx\nchars %d\nlayers %lld\nheads %lld\nwidth %lld\n"
             "context %lld\nvocabulary %lld\nbatch %lld\nseed %lld\nlr %.15g\ndropout %.15g\n",
             (long long)(t->train_size + t->val_size), (unsigned long long)hash, s->chars,
             (long long)s->layers, (long long)s->heads, (long long)s->width, (long long)s->context,
             (long long)s->vocabulary, (long long)s->batch, (long long)s->seed, s->lr, s->dropout);
    if (strcmp(s->dtype, "f32") != 0) { /* f32 has no line: earlier versions wrote none */
        const size_t used = strlen(text);
        snprintf(text + used, STATE_SETTINGS - used, "dtype %s\n", s->dtype);
    }
}

static int state_write_settings(const gpt_settings *set, const char *now) {
    char path[STATE_PATH];
    tsh_writer file;
    state_path(path, set, "settings.txt");
    tsh_writer_open(&file, path, 0);
    tsh_writer_add(&file, now, strlen(now));
    return tsh_writer_close(&file, 1) == TSH_OK ? 0 : refuse("%s", file.error.message);
}

/* Compares them with those of the state, line by line. */
static int state_check_settings(const gpt_settings *set, const char *now) {
    char path[STATE_PATH], then[STATE_SETTINGS] = "";
    state_path(path, set, "settings.txt");
    tsh_error why;
    FILE *file = tsh_file_open(path, STATE_SETTINGS, &why);
    if (file == NULL) return refuse("%s", why.message);
    then[fread(then, 1, sizeof then - 1, file)] = '\0';
    fclose(file);
    const char *a = then, *b = now;
    while (*a != '\0' || *b != '\0') {
        int m = (int)strcspn(a, "\n"), n = (int)strcspn(b, "\n");
        if (m != n || strncmp(a, b, (size_t)n) != 0)
            return refuse("--resume: the state in %s is of a run with '%.*s', this one has '%.*s'; "
                          "give the same flags, or another folder",
                          set->save, m, a, n, b);
        a += m + (a[m] == '\n');
        b += n + (b[n] == '\n');
    }
    return 0;
}

/* == the folder ============================================================ */

/* Of rank 0, before anything is computed: makes the folder, and finds out whether there is a state
 * to go on from. */
static int state_open(const gpt_settings *set, const gpt_text *text, int *found) {
    char path[STATE_PATH], now[STATE_SETTINGS];
    *found = 0;
    if (strlen(set->save) > REPORT_FOLDER)
        return refuse("--save %s: the name is too long", set->save);
    snprintf(path, sizeof path, "%s", set->save);
    if (!report_make_folder(path)) return refuse("cannot make %s: %s", path, strerror(errno));
    state_path(path, set, "state.safetensors");
    *found = access(path, F_OK) == 0;
    if (*found && !set->resume)
        return refuse("%s is the state of an earlier run: go on from it with --resume, or give "
                      "another folder",
                      path);
    state_describe(now, set, text);
    return *found ? state_check_settings(set, now) : state_write_settings(set, now);
}

/* == signals =============================================================== */

static volatile sig_atomic_t state_asked; /* to stop, by SIGINT or SIGTERM */

static void state_on_signal(int number) {
    (void)number;
    state_asked = 1;
}

/* on 1: the first SIGINT or SIGTERM sets state_asked, the second ends the process, as without. */
static void state_catch_signals(int on) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = on ? state_on_signal : SIG_DFL;
    action.sa_flags = on ? (int)(SA_RESTART | SA_RESETHAND) : 0;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

#endif /* GPT_STATE_H */
