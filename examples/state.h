/* state.h - how gpt.c and llm/llm.c stop, and go on where they stopped
 *
 * A folder keeps two files. state.safetensors is what tsh_save writes: weights, the optimiser's
 * moments, the random generators' state and the number of steps; it is always one complete state,
 * the old or the new one, even if the program is killed while it saves. settings.txt is what the
 * run learns, and how: a run with other settings cannot go on from this state. The next batch needs
 * no file: it follows from the seed and the step. */
#ifndef EXAMPLES_STATE_H
#define EXAMPLES_STATE_H

#include "gpt_report.h"

#include <signal.h>

/* STATE_API marks the functions that a program may call. */
#if defined(__GNUC__)
#define STATE_API __attribute__((unused)) static
#else
#define STATE_API static
#endif

enum { STATE_PATH = 1200, STATE_SETTINGS = 4096 };

static void state_path(char path[STATE_PATH], const char *folder, const char *name) {
    snprintf(path, STATE_PATH, "%s/%s", folder, name);
}

/* == settings.txt ========================================================== */

#define STATE_HASH UINT64_C(0xcbf29ce484222325) /* of no bytes */

/* FNV-1a, 64 bits: tells one text from another. */
STATE_API uint64_t state_hash(uint64_t hash, const void *bytes, int64_t count) {
    const unsigned char *at = (const unsigned char *)bytes;
    for (int64_t i = 0; i < count; i++) hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Writes settings.txt. now: the settings, a line for each. 0: *why says what failed. */
static int state_write_settings(const char *folder, const char *now, tsh_error *why) {
    char path[STATE_PATH];
    tsh_writer file;
    state_path(path, folder, "settings.txt");
    tsh_writer_open(&file, path, 0);
    tsh_writer_add(&file, now, strlen(now));
    if (tsh_writer_close(&file, 1) == TSH_OK) return 1;
    *why = file.error;
    return 0;
}

/* Compares the settings with those of the state, line by line. 0: *why says which differ. */
static int state_check_settings(const char *folder, const char *now, tsh_error *why) {
    char path[STATE_PATH], then[STATE_SETTINGS] = "";
    state_path(path, folder, "settings.txt");
    FILE *file = tsh_file_open(path, STATE_SETTINGS, why);
    if (file == NULL) return 0;
    then[fread(then, 1, sizeof then - 1, file)] = '\0';
    fclose(file);
    const char *a = then, *b = now;
    while (*a != '\0' || *b != '\0') {
        int m = (int)strcspn(a, "\n"), n = (int)strcspn(b, "\n");
        if (m != n || strncmp(a, b, (size_t)n) != 0) {
            (void)tsh_error_set(why, TSH_ERR_ARGUMENT, -1,
                                "--resume: the state in %.400s is of a run with '%.*s', this one "
                                "has '%.*s'; give the same flags, or another folder",
                                folder, m < 200 ? m : 200, a, n < 200 ? n : 200, b);
            return 0;
        }
        a += m + (a[m] == '\n');
        b += n + (b[n] == '\n');
    }
    return 1;
}

/* == the folder ============================================================ */

/* Of rank 0, before anything is computed: makes the folder, writes settings.txt or compares it, and
 * finds out whether there is a state to go on from. Without `resume` there may be none. 0: *why
 * says what failed. */
STATE_API int state_open(const char *folder, int resume, const char *now, int *found,
                         tsh_error *why) {
    char path[STATE_PATH];
    *found = 0;
    if (strlen(folder) > REPORT_FOLDER) {
        (void)tsh_error_set(why, TSH_ERR_IO, -1, "%.300s: the name of the folder is too long",
                            folder);
        return 0;
    }
    snprintf(path, sizeof path, "%s", folder);
    if (!report_make_folder(path)) {
        (void)tsh_error_set(why, TSH_ERR_IO, -1, "cannot make %s: %s", path, strerror(errno));
        return 0;
    }
    state_path(path, folder, "state.safetensors");
    *found = access(path, F_OK) == 0;
    if (*found && !resume) {
        (void)tsh_error_set(why, TSH_ERR_ARGUMENT, -1,
                            "%s is the state of an earlier run: go on from it with --resume, or "
                            "give another folder",
                            path);
        return 0;
    }
    return *found ? state_check_settings(folder, now, why) : state_write_settings(folder, now, why);
}

/* == signals =============================================================== */

static volatile sig_atomic_t state_asked; /* to stop, by SIGINT or SIGTERM */

static void state_on_signal(int number) {
    (void)number;
    state_asked = 1;
}

/* on 1: the first SIGINT or SIGTERM sets state_asked, the second ends the process, as without. */
STATE_API void state_catch_signals(int on) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = on ? state_on_signal : SIG_DFL;
    action.sa_flags = on ? (int)(SA_RESTART | SA_RESETHAND) : 0;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

#endif /* EXAMPLES_STATE_H */
