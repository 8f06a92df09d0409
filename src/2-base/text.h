/* ========================================================================== */
/* >>text                                              MARK: - text (private) */
/* Formats text as snprintf does, with a decimal point in every locale.       */
/* Needs: >>base.                                                             */
/* ========================================================================== */

enum { TSHI_TEXT_SIZE = 96 }; /* bytes of a buffer for the text of a shape, a layout or a table
                               * line */

/* Marks that surround a formatted number while its decimal separator is replaced. No format
 * contains these bytes. */
enum { TSHI_TEXT_NUMBER = 1, TSHI_TEXT_NUMBER_END = 2 };

/* Copies a format, with marks around the conversions of floating-point numbers. Returns the number
 * of these conversions; -1: the copy does not fit. */
static int tshi_text_mark_numbers(const char *format, char *to, size_t size) {
    char *const end = to + size - 3; /* leaves space for two marks and a final 0 */
    int count = 0;
    while (*format && to < end) {
        size_t n = 1, k;
        int number = 0;
        if (*format == '%') {
            n += strspn(format + 1, "-+ #0123456789.*hlLjzt");
            number = format[n] && strchr("fFeEgGaA", format[n]);
            n += format[n] != '\0';
        }
        if (n > (size_t)(end - to)) return -1;
        if (number) *to++ = TSHI_TEXT_NUMBER;
        for (k = 0; k < n; k++) *to++ = *format++;
        if (number) *to++ = TSHI_TEXT_NUMBER_END;
        count += number;
    }
    *to = '\0';
    return *format ? -1 : count;
}

/* Removes the marks from a text and, in the numbers between them, replaces the locale's decimal
 * separator, of one or more bytes, by a point. */
static void tshi_text_unmark_numbers(char *text) {
    const char *from = text;
    int number = 0, point = 0; /* number 1: `from` is inside a marked number; point 1: that number's
                                * decimal point has been written */
    for (; *from; from++) {
        const char c = *from;
        const int plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
                          (c >= 'A' && c <= 'Z') || c == '+' || c == '-' || c == ' ';
        if (c == TSHI_TEXT_NUMBER || c == TSHI_TEXT_NUMBER_END) {
            number = c == TSHI_TEXT_NUMBER;
            point = 0;
        } else if (!number || plain) {
            *text++ = c;
        } else if (!point) {
            *text++ = '.';
            point = 1;
        }
    }
    *text = '\0';
}

TSH_API void tsh_text_format(char *text, size_t capacity, const char *format, va_list list) {
    /* vsnprintf is called through a pointer, as compilers warn about a format that is no literal */
    int (*const print)(char *, size_t, const char *, va_list) = vsnprintf;
    char probe[8] = "", marked[1024];
    int numbers;
    if (!text || !format) return;
    numbers = tshi_text_mark_numbers(format, marked, sizeof marked);
    if (numbers) (void)snprintf(probe, sizeof probe, "%.1f", 0.5);
    if (probe[1] == '.') numbers = 0; /* the locale has a decimal point: nothing to replace */
    (void)print(text, capacity, numbers > 0 ? marked : format, list);
    if (numbers > 0 && capacity) tshi_text_unmark_numbers(text);
}

TSH_API void tsh_text_add(char *text, size_t capacity, const char *format, ...) {
    const size_t used = text ? strlen(text) : 0;
    va_list list;
    va_start(list, format);
    if (text && used + 1 < capacity) tsh_text_format(text + used, capacity - used, format, list);
    va_end(list);
}
