/* gpt_report.h - what gpt.c and llm/llm.c show while they train, and what they leave behind
 *
 * A progress bar on a terminal, plain lines elsewhere; metrics.csv with a row per step; loss.svg
 * with the curves. One report belongs to one thread. */
#ifndef GPT_REPORT_H
#define GPT_REPORT_H

#include "llm/quote.h"
#include <ctype.h> /* isprint */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h> /* mkdir */
#include <time.h>     /* clock_gettime */
#include <unistd.h>   /* isatty */

/* REPORT_API marks the functions that a program may call. */
#if defined(__GNUC__)
#define REPORT_API __attribute__((unused)) static
#else
#define REPORT_API static
#endif

enum { REPORT_FOLDER = 480 }; /* bytes of a folder's name */

typedef struct report_row {
    int64_t step;
    int evaluated; /* 1: val_loss is known at this step */
    double train_loss, val_loss;
    double lr, grad_norm, tokens_per_s;
    double accuracy; /* of gpt_report.accuracy, if evaluated */
} report_row;

typedef struct gpt_report {
    const char *unit;     /* of losses, for loss.svg */
    const char *accuracy; /* name of a share that is evaluated, too; NULL: none */
    char path[512]; /* of the file at hand */
    const char *folder;
    tsh_writer csv;       /* metrics.csv */
    tsh_error error;      /* why a file could not be written */
    int64_t steps, first; /* how many there will be; those of a run that this one goes on from */
    int terminal;
    report_row *rows;
    size_t count, room;
    double start, shown;         /* times: of the first step, of the last line or bar */
    double recent_sum;           /* training losses since the last evaluation */
    int64_t recent_count;        /* and their number */
    double speed;                /* tokens/s, smoothed */
    double train_loss, val_loss; /* at the last evaluation */
    char hold[4];                /* of the sample: the start of a character, `held` bytes */
    int held;
} gpt_report;

static double report_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 1234567 as "1,234,567". */
static const char *report_commas(char text[32], int64_t value) {
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)value);
    char *out = text;
    for (int i = 0; i < n; i++) {
        *out++ = digits[i];
        if (i < n - 1 && (n - 1 - i) % 3 == 0 && digits[i] != '-') *out++ = ',';
    }
    *out = '\0';
    return text;
}

/* == the folder and metrics.csv ============================================ */

/* Makes the folder and every folder above it. 0: errno, and path is the one that cannot be made. */
static int report_make_folder(char *path) {
    errno = ENOENT;
    if (path[0] == '\0') return 0;
    for (char *c = path + 1;; c++) {
        char end = *c;
        if (end != '/' && end != '\0') continue;
        *c = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return 0;
        if (end == '\0') return 1;
        *c = end;
    }
}

static const char *report_path(gpt_report *r, const char *name) {
    snprintf(r->path, sizeof r->path, "%s/%s", r->folder, name);
    return r->path;
}

#define REPORT_HEAD "step,train_loss,val_loss,lr,grad_norm,tokens_per_s"

/* The head of metrics.csv. */
static const char *report_head(const gpt_report *r) {
    return r->accuracy != NULL ? REPORT_HEAD ",val_accuracy\n" : REPORT_HEAD "\n";
}

/* Writes metrics.csv anew: its head, or all that is to stay of it; rows follow. */
static void report_restart(gpt_report *r, const char *text, size_t size) {
    tsh_writer_open(&r->csv, report_path(r, "metrics.csv"), 0);
    tsh_writer_add(&r->csv, text, size);
    if (tsh_writer_close(&r->csv, 1) == TSH_OK) tsh_writer_open(&r->csv, r->path, 1);
}

/* Starts a report in `folder`; all fields are 0 so far, but .unit and .accuracy. resume 1: keeps
 * the rows of metrics.csv; report_resume then drops those after the resumed step. Returns 0 on
 * failure; r->error says why. */
REPORT_API int report_open(gpt_report *r, const char *folder, int64_t steps, int resume) {
    r->folder = folder;
    r->steps = steps;
    r->terminal = isatty(STDOUT_FILENO);
    snprintf(r->path, sizeof r->path, "%s", folder);
    errno = ENAMETOOLONG;
    if (strlen(folder) > REPORT_FOLDER || !report_make_folder(r->path)) {
        tsh_error_set(&r->error, TSH_ERR_IO, -1, "cannot make %s: %s", r->path, strerror(errno));
        return 0;
    }
    if (resume) {
        FILE *file = tsh_file_open(report_path(r, "metrics.csv"), 0, &r->error);
        if (file != NULL) fclose(file);
        return file != NULL || errno == ENOENT;
    }
    report_restart(r, report_head(r), strlen(report_head(r)));
    r->error = r->csv.error;
    return r->error.code == TSH_OK;
}

/* Losses with all digits of a float: equal runs write equal rows, but for the time they took. */
static void report_csv(gpt_report *r, const report_row *row) {
    char line[160] = "";
    tsh_text_add(line, sizeof line, "%lld,%.9g,", (long long)row->step, row->train_loss);
    if (row->evaluated) tsh_text_add(line, sizeof line, "%.9g", row->val_loss);
    tsh_text_add(line, sizeof line, ",%.6g,%.6g,%.0f", row->lr, row->grad_norm, row->tokens_per_s);
    if (r->accuracy != NULL) tsh_text_add(line, sizeof line, ",");
    if (r->accuracy != NULL && row->evaluated)
        tsh_text_add(line, sizeof line, "%.9g", row->accuracy);
    tsh_text_add(line, sizeof line, "\n");
    tsh_writer_add(&r->csv, line, strlen(line));
}

/* Puts every row so far on the disk. */
REPORT_API void report_sync(gpt_report *r) {
    tsh_writer_sync(&r->csv);
}

/* == progress ============================================================== */

static void report_bar(const gpt_report *r, const report_row *row, double now) {
    enum { WIDTH = 24 };
    char bar[WIDTH + 1], speed[32];
    int done = (int)(WIDTH * row->step / r->steps);
    double each = (now - r->start) / (double)(row->step - r->first);
    double left = each * (double)(r->steps - row->step);
    memset(bar, '.', WIDTH);
    memset(bar, '#', (size_t)done);
    bar[WIDTH] = '\0';
    printf("\r\033[Kstep %lld/%lld [%s] loss %.3f, %s tokens/s, %lld:%02d left",
           (long long)row->step, (long long)r->steps, bar, r->recent_sum / (double)r->recent_count,
           report_commas(speed, (int64_t)r->speed), (long long)(left / 60), (int)fmod(left, 60));
    fflush(stdout);
}

static void report_line(const gpt_report *r, const report_row *row) {
    char speed[32];
    if (r->terminal) printf("\r\033[K");
    printf("step %6lld/%lld  train %.4f  ", (long long)row->step, (long long)r->steps,
           r->recent_sum / (double)r->recent_count);
    if (row->evaluated) printf("val %.4f  ", row->val_loss);
    if (row->evaluated && r->accuracy != NULL)
        printf("%s %.1f %%  ", r->accuracy, 100 * row->accuracy);
    printf("lr %.2e  norm %.2f  %s tokens/s\n", row->lr, row->grad_norm,
           report_commas(speed, (int64_t)r->speed));
    fflush(stdout);
}

static void report_progress(gpt_report *r, const report_row *row) {
    double now = report_now();
    if (row->evaluated || (!r->terminal && now - r->shown > 10)) {
        report_line(r, row);
        r->shown = now;
    }
    if (r->terminal && row->step < r->steps && (row->evaluated || now - r->shown > 0.1)) {
        report_bar(r, row, now);
        r->shown = now;
    }
}

REPORT_API void report_begin(gpt_report *r) {
    r->start = r->shown = report_now();
}

/* Keeps the row for the curve, and for the mean since the last evaluation. */
static void report_keep(gpt_report *r, const report_row *row) {
    if (r->count == r->room) {
        size_t room = r->room == 0 ? 1024 : 2 * r->room;
        report_row *rows = (report_row *)realloc(r->rows, room * sizeof *rows);
        if (rows != NULL) {
            r->rows = rows;
            r->room = room;
        }
    }
    if (r->count < r->room) r->rows[r->count++] = *row; /* else the curve ends early, no harm */
    r->recent_sum += row->train_loss;
    r->recent_count++;
}

/* Ends a mean of training losses at an evaluation, and begins the next. */
static void report_evaluated(gpt_report *r, const report_row *row) {
    r->train_loss = r->recent_sum / (double)r->recent_count;
    r->val_loss = row->val_loss;
    r->recent_sum = 0;
    r->recent_count = 0;
}

/* Every step, once. */
REPORT_API void report_step(gpt_report *r, const report_row *row) {
    report_keep(r, row);
    r->speed = r->speed > 0 ? 0.95 * r->speed + 0.05 * row->tokens_per_s : row->tokens_per_s;
    report_csv(r, row);
    report_progress(r, row);
    if (row->evaluated) report_evaluated(r, row);
}

/* Parses a row of metrics.csv. 0: it is not a complete row. */
static int report_parse(const char *line, report_row *row) {
    char *end = NULL;
    memset(row, 0, sizeof *row);
    row->step = strtoll(line, &end, 10);
    if (end == line || *end++ != ',') return 0;
    row->train_loss = strtod(end, &end);
    if (*end++ != ',') return 0;
    row->evaluated = *end != ',';
    row->val_loss = strtod(end, &end);
    return *end == ',' && line[strlen(line) - 1] == '\n';
}

/* Keeps the rows of metrics.csv up to step, drops what comes after them: the next row is that of
 * the step after it. Returns the last step that the file has. */
REPORT_API int64_t report_resume(gpt_report *r, int64_t step) {
    FILE *file = tsh_file_open(report_path(r, "metrics.csv"), 0, NULL);
    char line[256], *text = NULL, *more;
    int64_t last = 0;
    size_t size = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const size_t n = strlen(line);
        report_row row;
        int is_row = report_parse(line, &row);
        if (is_row && row.step > step) break;
        if (!is_row && strcmp(line, report_head(r)) != 0) break;
        more = (char *)realloc(text, size + n);
        if (more == NULL) break;
        text = more;
        memcpy(text + size, line, n);
        size += n;
        if (!is_row) continue;
        last = row.step;
        report_keep(r, &row);
        if (row.evaluated) report_evaluated(r, &row);
    }
    if (file != NULL) fclose(file);
    if (size > 0) report_restart(r, text, size);
    else report_restart(r, report_head(r), strlen(report_head(r)));
    free(text);
    r->first = step;
    return last;
}

/* == the sample ============================================================= */

/* Writes a byte of gpt.c's sample. A model invents bytes: what is no text is shown as '?', and a
 * character of several bytes (UTF-8) waits until it is whole. */
#if defined(__GNUC__)
__attribute__((unused))
#endif
static void report_byte(gpt_report *r, int byte) {
    int first = r->held > 0 ? (unsigned char)r->hold[0] : 0;
    int size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (r->held > 0 && (byte & 0xc0) == 0x80) {
        r->hold[r->held++] = (char)byte;
        if (r->held < size) return;
        if (quote_control(r->hold, (size_t)size)) putchar('?');
        else printf("%.*s", size, r->hold);
        r->held = 0;
    } else {
        if (r->held > 0) putchar('?');
        r->held = 0;
        if (byte >= 0xc2 && byte <= 0xf4) r->hold[r->held++] = (char)byte;
        if (byte < 0x80) putchar(isprint(byte) || byte == '\n' || byte == '\t' ? byte : '?');
        if (byte >= 0x80 && r->held == 0) putchar('?');
    }
    fflush(stdout);
}

/* == loss.svg ============================================================== */

enum { PLOT_LEFT = 64, PLOT_TOP = 44, PLOT_WIDTH = 620, PLOT_HEIGHT = 320, PLOT_POINTS = 400 };

typedef struct plot {
    tsh_writer *file;
    double steps;           /* x runs from 0 to steps */
    double low, high, tick; /* of y */
} plot;

/* Adds to the file, as printf. */
TSH_PRINTF(2, 3) static void plot_put(const plot *p, const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    tsh_text_format(text, sizeof text, format, list);
    va_end(list);
    tsh_writer_add(p->file, text, strlen(text));
}

static double plot_x(const plot *p, double step) {
    return PLOT_LEFT + PLOT_WIDTH * step / p->steps;
}

static double plot_y(const plot *p, double loss) {
    return PLOT_TOP + PLOT_HEIGHT * (p->high - loss) / (p->high - p->low);
}

/* 1, 2 or 5 times a power of ten: about `parts` ticks in range. */
static double plot_tick(double range, int parts) {
    double raw = range / parts, power = pow(10, floor(log10(raw)));
    double digit = raw / power;
    return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

static int plot_has_val(const report_row *row) {
    return row->evaluated && isfinite(row->val_loss);
}

/* The range of y: all finite losses, out to the next tick. */
static void plot_scale(plot *p, const gpt_report *r) {
    double low = HUGE_VAL, high = -HUGE_VAL;
    for (size_t i = 0; i < r->count; i++) {
        double pair[2];
        pair[0] = r->rows[i].train_loss;
        pair[1] = plot_has_val(&r->rows[i]) ? r->rows[i].val_loss : pair[0];
        for (int j = 0; j < 2; j++) {
            if (isfinite(pair[j]) && pair[j] < low) low = pair[j];
            if (isfinite(pair[j]) && pair[j] > high) high = pair[j];
        }
    }
    if (low > high) low = high = 0;
    if (high - low < 1e-3) high = low + 1e-3;
    p->tick = plot_tick(high - low, 6);
    p->low = floor(low / p->tick) * p->tick;
    p->high = ceil(high / p->tick) * p->tick;
    p->steps = (double)(r->count > 0 ? r->rows[r->count - 1].step : 1);
}

static void plot_axes(const plot *p, const char *unit) {
    double step = p->steps < 6 ? 1 : plot_tick(p->steps, 6), right = plot_x(p, p->steps);
    int decimals = p->tick >= 1 ? 0 : (int)ceil(-log10(p->tick) - 1e-9);
    plot_put(p, "<g stroke=\"#ddd\">\n");
    for (int i = 0; p->low + i * p->tick <= p->high + p->tick / 2; i++) {
        double y = plot_y(p, p->low + i * p->tick);
        plot_put(p, "<path d=\"M%d %.1fH%.1f\"/>\n", PLOT_LEFT, y, right);
    }
    plot_put(p, "</g>\n<g stroke=\"#333\" fill=\"none\"><path d=\"M%d %dV%dH%.1f\"/>\n", PLOT_LEFT,
            PLOT_TOP, PLOT_TOP + PLOT_HEIGHT, right);
    for (double x = 0; x <= p->steps; x += step)
        plot_put(p, "<path d=\"M%.1f %dv5\"/>\n", plot_x(p, x), PLOT_TOP + PLOT_HEIGHT);
    plot_put(p, "</g>\n<g text-anchor=\"end\">\n");
    for (int i = 0; p->low + i * p->tick <= p->high + p->tick / 2; i++)
        plot_put(p, "<text x=\"%d\" y=\"%.1f\">%.*f</text>\n", PLOT_LEFT - 8,
                plot_y(p, p->low + i * p->tick) + 4, decimals, p->low + i * p->tick);
    plot_put(p, "</g>\n<g text-anchor=\"middle\">\n");
    for (double x = 0; x <= p->steps; x += step)
        plot_put(p, "<text x=\"%.1f\" y=\"%d\">%.0f</text>\n", plot_x(p, x),
                PLOT_TOP + PLOT_HEIGHT + 20, x);
    plot_put(p, "<text x=\"%d\" y=\"%d\">step</text>\n", PLOT_LEFT + PLOT_WIDTH / 2,
            PLOT_TOP + PLOT_HEIGHT + 42);
    plot_put(p, "<text transform=\"translate(18 %d) rotate(-90)\">loss in %s</text>\n",
            PLOT_TOP + PLOT_HEIGHT / 2, unit);
    plot_put(p, "</g>\n");
}

/* The training loss, each point the mean of its neighbours where there are many. */
static void plot_train(const plot *p, const gpt_report *r) {
    size_t stride = r->count / PLOT_POINTS + 1;
    plot_put(p, "<polyline fill=\"none\" stroke=\"#7aa6d8\" stroke-width=\"1.2\" points=\"");
    for (size_t i = 0; i < r->count; i += stride) {
        double loss = 0, step = 0;
        size_t n = r->count - i < stride ? r->count - i : stride;
        for (size_t j = i; j < i + n; j++) {
            loss += r->rows[j].train_loss / (double)n;
            step += (double)r->rows[j].step / (double)n;
        }
        if (isfinite(loss)) plot_put(p, "%.1f,%.1f ", plot_x(p, step), plot_y(p, loss));
    }
    plot_put(p, "\"/>\n");
}

static void plot_val(const plot *p, const gpt_report *r) {
    plot_put(p, "<polyline fill=\"none\" stroke=\"#c4420e\" stroke-width=\"2\" points=\"");
    for (size_t i = 0; i < r->count; i++)
        if (plot_has_val(&r->rows[i]))
            plot_put(p, "%.1f,%.1f ", plot_x(p, (double)r->rows[i].step),
                    plot_y(p, r->rows[i].val_loss));
    plot_put(p, "\"/>\n<g fill=\"#c4420e\">\n");
    for (size_t i = 0; i < r->count; i++)
        if (plot_has_val(&r->rows[i]))
            plot_put(p, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\"/>\n",
                    plot_x(p, (double)r->rows[i].step), plot_y(p, r->rows[i].val_loss));
    plot_put(p, "</g>\n");
}

static void plot_legend(const plot *p, const gpt_report *r) {
    int x = PLOT_LEFT + PLOT_WIDTH - 190, y = PLOT_TOP + 14;
    plot_put(p, "<rect x=\"%d\" y=\"%d\" width=\"186\" height=\"48\" fill=\"white\"/>\n",
            x - 10, y - 12);
    plot_put(p, "<path d=\"M%d %dh24\" stroke=\"#7aa6d8\" stroke-width=\"1.5\"/>\n", x, y);
    plot_put(p, "<text x=\"%d\" y=\"%d\">training, %.3f</text>\n", x + 32, y + 4,
            r->train_loss);
    plot_put(p, "<path d=\"M%d %dh24\" stroke=\"#c4420e\" stroke-width=\"2\"/>\n", x, y + 22);
    plot_put(p, "<circle cx=\"%d\" cy=\"%d\" r=\"2.6\" fill=\"#c4420e\"/>\n", x + 12, y + 22);
    plot_put(p, "<text x=\"%d\" y=\"%d\">validation, %.3f</text>\n", x + 32, y + 26,
            r->val_loss);
}

/* 0: r->error says why not. */
REPORT_API int report_svg(gpt_report *r, const char *title) {
    int width = PLOT_LEFT + PLOT_WIDTH + 24, height = PLOT_TOP + PLOT_HEIGHT + 56;
    tsh_writer file;
    plot p;
    memset(&p, 0, sizeof p);
    tsh_writer_open(&file, report_path(r, "loss.svg"), 0);
    p.file = &file;
    plot_scale(&p, r);
    plot_put(&p,
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
             "height=\"%d\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n",
             width, height, width, height);
    plot_put(&p, "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n");
    plot_put(&p, "<text x=\"%d\" y=\"26\" font-size=\"15\">%s</text>\n", PLOT_LEFT, title);
    plot_axes(&p, r->unit);
    plot_train(&p, r);
    plot_val(&p, r);
    plot_legend(&p, r);
    plot_put(&p, "</svg>\n");
    if (tsh_writer_close(&file, 1) != TSH_OK) r->error = file.error;
    return file.error.code == TSH_OK;
}

/* Closes metrics.csv. 0: r->error says what could not be written. */
REPORT_API int report_close(gpt_report *r) {
    const int good = tsh_writer_close(&r->csv, 1) == TSH_OK;
    if (!good) r->error = r->csv.error;
    free(r->rows);
    r->rows = NULL;
    return good;
}

#endif /* GPT_REPORT_H */
