// Random datatypes with their typemaps. A type is drawn as a tree of constructors, and its typemap is
// computed from what the MPI standard (4.1, section 5.1) says of each constructor, without asking the MPI
// library. Only then does `make` call the constructors. So ranks that draw from the same seed know each
// other's types.
#ifndef TYPEMAP_H
#define TYPEMAP_H
#include "transfer.h"
#include <strings.h>

// Says what was being done, beside what went wrong.
static void give_up(const char *file, int line, const char *format, ...);
#undef FAIL
#define FAIL(...) give_up(__FILE__, __LINE__, __VA_ARGS__)

static const char *words_of(int error) {
    static char text[MPI_MAX_ERROR_STRING];
    int length;
    return MPI_Error_string(error, text, &length) == MPI_SUCCESS ? text : "an error without words";
}
#undef OK
#define OK(call) \
    do { int rc_ = (call); if (rc_ != MPI_SUCCESS) FAIL("%s: %s", #call, words_of(rc_)); } while (0)

// ---- random numbers --------------------------------------------------------------------------------------

static uint64_t *state; // of the generator in use

static uint64_t draw(void) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static long below(long n) { return n > 0 ? (long)(draw() % (uint64_t)n) : 0; }
static long between(long least, long most) { return least + below(most - least + 1); }
static int chance(int percent) { return below(100) < percent; }

// 1 to `most`, each order of magnitude as likely as another.
static long magnitude(long most) {
    int bits = 0;
    if (most < 1) return 0;
    while (most >> (bits + 1)) bits++;
    long high = 1L << (1 + below(bits + 1));
    return 1 + below(high < most ? high : most);
}

static long least_of(long a, long b) { return a < b ? a : b; }
static long most_of(long a, long b) { return a > b ? a : b; }
static long size_of(long n) { return n < 0 ? -n : n; }
// The least multiple of `unit` that is not below n.
static long round_up(long n, long unit) { return n + ((-n % unit) + unit) % unit; }

// Whether $WITHOUT names it.
static int is_left_out(const char *name) {
    const char *at = getenv("WITHOUT");
    while (at && *at) {
        size_t length = strcspn(at, ",");
        if (length == strlen(name) && !strncasecmp(at, name, length)) return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

// ---- memory of descriptions, given back all at once ------------------------------------------------------

struct chunk { struct chunk *next; size_t used, size; _Alignas(16) unsigned char bytes[]; };
struct store { struct chunk *first; };
static struct store *store; // where `keep` takes from

static void *keep(size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    struct chunk *c = store->first;
    if (!c || c->size - c->used < bytes) {
        size_t size = bytes > 1 << 16 ? bytes : 1 << 16;
        c = scratch(sizeof *c + size);
        *c = (struct chunk){.next = store->first, .size = size};
        store->first = c;
    }
    void *p = c->bytes + c->used;
    c->used += bytes;
    return memset(p, 0, bytes);
}

static void store_clear(struct store *s) {
    while (s->first && s->first->next) {
        struct chunk *next = s->first->next;
        free(s->first);
        s->first = next;
    }
    if (s->first) s->first->used = 0;
}

// ---- descriptions ----------------------------------------------------------------------------------------

#define SHAPES(X) X(LEAF) X(POOLED) X(CONTIGUOUS) X(VECTOR) X(HVECTOR) X(INDEXED) X(HINDEXED) \
    X(INDEXED_BLOCK) X(HINDEXED_BLOCK) X(STRUCT) X(SUBARRAY) X(DARRAY) X(RESIZED) X(DUP)
enum shape { SHAPES(ENUM) SHAPE_COUNT };
static const char *const shape_name[] = {SHAPES(NAME)};

enum { DIMS = 4, MEMBERS = 5 };

// Bytes of an item. Loose ones are padding within a value, which an MPI library may leave out.
struct run { long at, bytes; int is_loose; };

struct leaf {
    const char *name;
    MPI_Datatype type;
    int runs;
    struct run run[4];
    long size, extent, align;
    long grain; // its size, if it is one value
};

// What becomes of the handle of an inner type once its parent is made.
enum fate { FREED_AT_ONCE, FREED_LATER, FREED_WITH_PARENT };

struct node {
    enum shape shape;
    const struct leaf *leaf;
    int slot;              // of a pooled type
    int parts;             // blocks, members of a struct, or dimensions
    long length, stride;   // of a vector; the new lower bound and extent of a resized type
    long *lengths, *places;
    int inners;
    struct node *inner[MEMBERS];
    int sizes[DIMS], subsizes[DIMS], starts[DIMS], order;
    int distribs[DIMS], dargs[DIMS], grid[DIMS], process, processes;
    int large, is_committed;
    enum fate fate;        // of its own handle, once it is inside another
    // One item: its bytes in the order in which they are sent, those that follow each other in one run.
    struct run *runs;
    long run_count, size;
    long lb, ub;
    int has_bounds;        // 0: there is neither data nor a bound in it
    int is_marked;         // its bounds are explicit
    int bounds_agree;      // all MPI libraries see these bounds,
    int true_bounds_agree; // and these of the data
    long align;            // of the address that is passed, so that each basic item is aligned
    long grain;            // bytes of a basic item, if all are alike; 0: they are not
    long first, end;       // the data lie in there
};

static int without[SHAPE_COUNT]; // shapes that are not drawn
static int without_large;        // nor constructors and calls with large counts

static long extent_of(const struct node *n) { return n->ub - n->lb; }

// What is drawn stays within these.
static struct {
    long bytes, runs, span;
    int may_overlap;
    long grain; // not 0: all basic items have this size
} limits;

static struct node *node_new(enum shape shape, struct node *inner) {
    struct node *n = keep(sizeof *n);
    n->shape = shape;
    n->inner[0] = inner;
    n->inners = inner != NULL;
    return n;
}

static void add_run(struct node *n, long at, long bytes, int is_loose) {
    struct run *last = n->runs + n->run_count - 1;
    if (n->run_count && last->at + last->bytes == at && last->is_loose == is_loose) last->bytes += bytes;
    else n->runs[n->run_count++] = (struct run){at, bytes, is_loose};
}

static void add_bounds(struct node *n, long lb, long ub) {
    n->lb = n->has_bounds ? least_of(n->lb, lb) : lb;
    n->ub = n->has_bounds ? most_of(n->ub, ub) : ub;
    n->has_bounds = 1;
}

// Several items are one run.
static int is_dense(const struct node *n) {
    return n->run_count == 1 && n->runs->bytes == extent_of(n) && !n->runs->is_loose;
}

static long runs_of(const struct node *inner, long count) {
    return count <= 0 ? 0 : is_dense(inner) ? 1 : count * inner->run_count;
}

// `count` items of an inner type, one extent apart, the first displaced by `at`.
static void lay(struct node *n, const struct node *inner, long at, long count) {
    if (count <= 0 || !inner->has_bounds) return;
    if (is_dense(inner)) add_run(n, at + inner->first, count * inner->size, 0);
    else for (long i = 0; i < count; i++)
        for (const struct run *r = inner->runs; r < inner->runs + inner->run_count; r++)
            add_run(n, at + i * extent_of(inner) + r->at, r->bytes, r->is_loose);
    long last = at + (count - 1) * extent_of(inner);
    add_bounds(n, least_of(at, last) + inner->lb, most_of(at, last) + inner->ub);
}

static int is_before(const void *a, const void *b) {
    long x = ((const struct run *)a)->at, y = ((const struct run *)b)->at;
    return (x > y) - (x < y);
}

static int overlaps(const struct node *n) {
    const struct run *runs = n->runs;
    int is_rising = 1, found = 0;
    for (long r = 1; r < n->run_count; r++) is_rising &= runs[r - 1].at + runs[r - 1].bytes <= runs[r].at;
    if (is_rising) return 0;
    struct run *sorted = scratch(n->run_count * sizeof *sorted);
    memcpy(sorted, runs, n->run_count * sizeof *sorted);
    qsort(sorted, n->run_count, sizeof *sorted, is_before);
    for (long r = 1; r < n->run_count; r++) found |= sorted[r - 1].at + sorted[r - 1].bytes > sorted[r].at;
    free(sorted);
    return found;
}

// How many items there are of its inner types, in bytes, and in runs before adjacent ones are joined.
static long count_items(const struct node *n, long *bytes) {
    const struct node *inner = n->inner[0];
    long runs = 0, items = 1;
    *bytes = 0;
    switch (n->shape) {
    case RESIZED:
    case DUP: *bytes = inner->size; return inner->run_count;
    case CONTIGUOUS: *bytes = n->length * inner->size; return runs_of(inner, n->length);
    case VECTOR:
    case HVECTOR:
    case INDEXED_BLOCK:
    case HINDEXED_BLOCK:
        *bytes = n->parts * n->length * inner->size;
        return n->parts * runs_of(inner, n->length);
    case SUBARRAY:
    case DARRAY: // of which it may have a part
        for (int d = 0; d < n->parts; d++) items *= n->shape == SUBARRAY ? n->subsizes[d] : n->sizes[d];
        if (n->shape == SUBARRAY) *bytes = items * inner->size;
        return items * inner->run_count;
    default:
        for (int b = 0; b < n->parts; b++) {
            inner = n->inner[n->shape == STRUCT ? b : 0];
            runs += runs_of(inner, n->lengths[b]);
            *bytes += n->lengths[b] * inner->size;
        }
        return runs;
    }
}

// Whether index i of dimension d of a distributed array belongs to its process.
static int is_owned(const struct node *n, int d, int i) {
    int rest = n->process, below_d = 1;
    for (int e = d + 1; e < n->parts; e++) below_d *= n->grid[e];
    int place = rest / below_d % n->grid[d]; // the grid is in row-major order, whatever the array's order is
    int block = n->dargs[d];
    switch (n->distribs[d]) {
    case MPI_DISTRIBUTE_BLOCK:
        if (block == MPI_DISTRIBUTE_DFLT_DARG) block = (n->sizes[d] + n->grid[d] - 1) / n->grid[d];
        return i / block == place;
    case MPI_DISTRIBUTE_CYCLIC:
        if (block == MPI_DISTRIBUTE_DFLT_DARG) block = 1;
        return i / block % n->grid[d] == place;
    default: return 1;
    }
}

// The elements of an array that a subarray or a process has, in the order in which the array lies in memory.
static void lay_array(struct node *n) {
    long all = 1;
    for (int d = 0; d < n->parts; d++) all *= n->sizes[d];
    for (long element = 0; element < all; element++) {
        long rest = element;
        int is_mine = 1;
        for (int k = 0; k < n->parts; k++) {
            int d = n->order == MPI_ORDER_C ? n->parts - 1 - k : k; // the fastest first
            int i = rest % n->sizes[d];
            rest /= n->sizes[d];
            if (n->shape == DARRAY) is_mine &= is_owned(n, d, i);
            else is_mine &= i >= n->starts[d] && i < n->starts[d] + n->subsizes[d];
        }
        if (is_mine) lay(n, n->inner[0], element * extent_of(n->inner[0]), 1);
    }
    n->lb = 0;
    n->ub = all * extent_of(n->inner[0]);
    n->has_bounds = n->is_marked = 1;
}

// What MPI libraries themselves get wrong, and is not drawn.
static int is_beyond_the_library(const struct node *n) {
#ifdef OPEN_MPI
    // Open MPI 4.1 and 5.0 take a stride of -1 bytes for no stride, and lay the blocks one behind the other.
    if (n->shape == VECTOR && n->stride * extent_of(n->inner[0]) == -1) return 1;
    if (n->shape == HVECTOR && n->stride == -1) return 1;
#else
    // MPICH 4 divides by zero when it packs a struct that has a member without data.
    for (int b = 0; n->shape == STRUCT && b < n->parts; b++)
        if (n->lengths[b] && !n->inner[b]->size) return 1;
    // MPICH packs several items wrongly if each lies before the last one, or in the same place.
    if (n->size && extent_of(n) <= 0) return 1;
#endif
    return 0;
}

// Whether MPI libraries see the bounds of a struct as the standard has them; sets the upper one. By the
// standard only explicit bounds count if any member has them, and otherwise the extent is rounded up to the
// alignment of the data. Some libraries let all bounds count, and some round again with each member.
static int struct_bounds_agree(struct node *n, int marked, int unmarked) {
    int first = 0, are_leaves = 1;
    long align = 1;
    while (first < n->parts && !n->lengths[first]) first++;
    if (first == n->parts || (marked && unmarked)) return 0;
    struct node *inner = n->inner[first];
    long last = (n->lengths[first] - 1) * extent_of(inner);
    if (n->places[first] + inner->lb + least_of(0, last) != n->lb) return 0;
    for (int b = 0; b < n->parts; b++) {
        are_leaves &= n->inner[b]->shape == LEAF;
        if (n->lengths[b]) align = most_of(align, n->inner[b]->align);
    }
    if (extent_of(n) % align == 0) return 1;
    if (n->lb % align || !are_leaves) return 0;
    n->ub = round_up(n->ub, align);
    return 1;
}

// Computes the typemap of a node whose inner types have theirs. 0: it is beyond the limits.
static int resolve(struct node *n) {
    struct node *inner = n->inner[0];
    long bytes, runs = count_items(n, &bytes);
    n->align = 1;
    n->bounds_agree = n->true_bounds_agree = 1;
    if (bytes > limits.bytes || runs > 4 * limits.runs) return 0;
    n->runs = keep((runs + 1) * sizeof *n->runs);
    for (int i = 0; i < n->inners; i++) n->align = most_of(n->align, n->inner[i]->align);
    switch (n->shape) {
    case CONTIGUOUS: lay(n, inner, 0, n->length); break;
    case VECTOR:
        for (int b = 0; b < n->parts; b++) lay(n, inner, b * n->stride * extent_of(inner), n->length);
        break;
    case HVECTOR:
        for (int b = 0; b < n->parts; b++) lay(n, inner, b * n->stride, n->length);
        break;
    case INDEXED:
        for (int b = 0; b < n->parts; b++) lay(n, inner, n->places[b] * extent_of(inner), n->lengths[b]);
        break;
    case HINDEXED:
        for (int b = 0; b < n->parts; b++) lay(n, inner, n->places[b], n->lengths[b]);
        break;
    case INDEXED_BLOCK:
        for (int b = 0; b < n->parts; b++) lay(n, inner, n->places[b] * extent_of(inner), n->length);
        break;
    case HINDEXED_BLOCK:
        for (int b = 0; b < n->parts; b++) lay(n, inner, n->places[b], n->length);
        break;
    case STRUCT:
        for (int b = 0; b < n->parts; b++) lay(n, n->inner[b], n->places[b], n->lengths[b]);
        break;
    case SUBARRAY:
    case DARRAY: lay_array(n); break;
    case RESIZED:
        lay(n, inner, 0, 1);
        n->lb = n->length;
        n->ub = n->length + n->stride;
        n->has_bounds = n->is_marked = 1;
        break;
    case DUP: lay(n, inner, 0, 1); break;
    default: FAIL("a type of shape %s has no inner type", shape_name[n->shape]);
    }
    n->grain = -1;
    for (int i = 0; i < n->inners; i++) {
        if (!n->inner[i]->size || (n->shape == STRUCT && !n->lengths[i])) continue;
        n->grain = n->grain == -1 || n->grain == n->inner[i]->grain ? n->inner[i]->grain : 0;
    }
    if (n->grain == -1) n->grain = 0;
    for (long r = 0; r < n->run_count; r++) {
        n->size += n->runs[r].bytes;
        n->first = r ? least_of(n->first, n->runs[r].at) : n->runs[r].at;
        n->end = r ? most_of(n->end, n->runs[r].at + n->runs[r].bytes) : n->runs[r].at + n->runs[r].bytes;
    }
    int marked = 0, unmarked = 0;
    for (int i = 0; i < n->inners; i++) {
        if (n->shape == STRUCT && !n->lengths[i]) continue;
        *(n->inner[i]->is_marked ? &marked : &unmarked) = 1;
        n->bounds_agree &= n->inner[i]->bounds_agree;
        // Of a type without data some libraries see bounds, and take them for those of the data.
        n->true_bounds_agree &= n->inner[i]->true_bounds_agree && n->inner[i]->size;
        if (n->shape == STRUCT) n->bounds_agree &= !!n->inner[i]->size;
    }
    n->bounds_agree &= n->size != 0;
#ifndef OPEN_MPI
    n->true_bounds_agree &= n->shape != DARRAY; // MPICH may see them wider than they are
#endif
    if (n->shape == STRUCT) n->bounds_agree &= struct_bounds_agree(n, marked, unmarked);
    if (n->shape == RESIZED) n->bounds_agree = 1;
    if (n->shape != RESIZED && n->shape != SUBARRAY && n->shape != DARRAY) n->is_marked = marked;
    if (n->run_count > limits.runs || n->size > limits.bytes || is_beyond_the_library(n)) return 0;
    if (n->end - n->first > limits.span || size_of(extent_of(n)) > limits.span) return 0;
    return limits.may_overlap || !overlaps(n);
}

// `count` items in a row, as a type that is never made: to look at all of a message.
static struct node *row_of(struct node *item, long count) {
    struct node *n = node_new(CONTIGUOUS, item);
    n->length = count;
    n->runs = keep((count * item->run_count + 1) * sizeof *n->runs);
    lay(n, item, 0, count);
    return n;
}

static void describe(FILE *to, const struct node *n);

static void describe_list(FILE *to, const char *name, const long *list, int count) {
    fprintf(to, " %s[%d]", name, count);
    for (int i = 0; i < count && i < 16; i++) fprintf(to, "%c%ld", i ? ',' : ' ', list[i]);
    if (count > 16) fprintf(to, ",...,%ld", list[count - 1]);
}

static void describe_dims(FILE *to, const char *name, const int *list, int count) {
    fprintf(to, " %s", name);
    for (int i = 0; i < count; i++) fprintf(to, "%c%d", i ? ',' : ' ', list[i]);
}

static void describe(FILE *to, const struct node *n) {
    if (n->shape == LEAF) { fprintf(to, "%s", n->leaf->name); return; }
    fprintf(to, "%s%s(", shape_name[n->shape], n->large ? "_c" : "");
    switch (n->shape) {
    case POOLED: fprintf(to, "%d", n->slot); break;
    case CONTIGUOUS: fprintf(to, "%ld", n->length); break;
    case VECTOR:
    case HVECTOR: fprintf(to, "%d blocks of %ld, stride %ld", n->parts, n->length, n->stride); break;
    case INDEXED_BLOCK:
    case HINDEXED_BLOCK:
        fprintf(to, "blocks of %ld", n->length);
        describe_list(to, "places", n->places, n->parts);
        break;
    case SUBARRAY:
        fprintf(to, "%s", n->order == MPI_ORDER_C ? "C" : "Fortran");
        describe_dims(to, "sizes", n->sizes, n->parts);
        describe_dims(to, "subsizes", n->subsizes, n->parts);
        describe_dims(to, "starts", n->starts, n->parts);
        break;
    case DARRAY:
        fprintf(to, "%s, process %d", n->order == MPI_ORDER_C ? "C" : "Fortran", n->process);
        describe_dims(to, "sizes", n->sizes, n->parts);
        for (int d = 0; d < n->parts; d++) {
            const char *name = n->distribs[d] == MPI_DISTRIBUTE_BLOCK ? "block"
                : n->distribs[d] == MPI_DISTRIBUTE_CYCLIC ? "cyclic" : "none";
            if (n->dargs[d] == MPI_DISTRIBUTE_DFLT_DARG) fprintf(to, " %s", name);
            else fprintf(to, " %s(%d)", name, n->dargs[d]);
        }
        describe_dims(to, "grid", n->grid, n->parts);
        break;
    case RESIZED: fprintf(to, "lb %ld, extent %ld", n->length, n->stride); break;
    case DUP: break;
    default:
        describe_list(to, "lengths", n->lengths, n->parts);
        describe_list(to, "places", n->places, n->parts);
    }
    fprintf(to, ") of ");
    if (n->shape == STRUCT) fprintf(to, "{");
    for (int i = 0; i < n->inners; i++) {
        if (i) fprintf(to, "; ");
        describe(to, n->inner[i]);
    }
    if (n->shape == STRUCT) fprintf(to, "}");
}

// ---- leaves ----------------------------------------------------------------------------------------------

enum { LEAVES = 64 };
static struct leaf leaves[LEAVES];
static int leaf_count;
static const struct leaf *byte_leaf;

// Padding within a value: of the 16 bytes of a long double MPI libraries that pack value by value copy ten.
static long padding_of(long align) { return align == _Alignof(long double) ? sizeof(long double) - 10 : 0; }

static void add_value(struct leaf *l, long at, long size, long padding) {
    l->run[l->runs++] = (struct run){at, size - padding, 0};
    if (padding) l->run[l->runs++] = (struct run){at + size - padding, padding, 1};
}

static void add_leaf(struct leaf l) {
    CHECK(leaf_count < LEAVES, "too many leaves");
    if (leaf_count == 0 || !is_left_out(l.name)) leaves[leaf_count++] = l;
}

static void add_simple(const char *name, MPI_Datatype type, long size, long align) {
    struct leaf l = {.name = name, .type = type, .size = size, .extent = size, .align = align};
    long padding = padding_of(align), value = padding ? (long)sizeof(long double) : size;
    l.grain = align == size ? size : 0;
    for (long at = 0; at < size; at += value) add_value(&l, at, value, padding);
    add_leaf(l);
}

// A value and its index, maybe with a gap between them and one at the end.
static void add_pair(const char *name, MPI_Datatype type, long size, long align) {
    long int_size = sizeof(int), index = round_up(size, int_size), most = most_of(align, int_size);
    long padding = padding_of(align), extent = round_up(index + int_size, most);
    struct leaf l = {.name = name, .type = type, .size = size + int_size, .extent = extent, .align = most};
    if (index == size && !padding) add_value(&l, 0, size + int_size, 0);
    else {
        add_value(&l, 0, size, padding);
        add_value(&l, index, int_size, 0);
    }
    add_leaf(l);
}

static void find_leaves(void) {
#define SIMPLE(type, c) add_simple(#type, type, sizeof(c), _Alignof(c))
#define PAIR(type, c) add_pair(#type, type, sizeof(c), _Alignof(c))
    SIMPLE(MPI_BYTE, char);
    byte_leaf = leaves;
    SIMPLE(MPI_CHAR, char);
    SIMPLE(MPI_SIGNED_CHAR, char);
    SIMPLE(MPI_UNSIGNED_CHAR, char);
    SIMPLE(MPI_INT8_T, int8_t);
    SIMPLE(MPI_UINT8_T, uint8_t);
    SIMPLE(MPI_SHORT, short);
    SIMPLE(MPI_UNSIGNED_SHORT, short);
    SIMPLE(MPI_INT16_T, int16_t);
    SIMPLE(MPI_INT, int);
    SIMPLE(MPI_UNSIGNED, int);
    SIMPLE(MPI_FLOAT, float);
    SIMPLE(MPI_WCHAR, wchar_t);
    SIMPLE(MPI_UINT32_T, uint32_t);
    SIMPLE(MPI_LONG, long);
    SIMPLE(MPI_UNSIGNED_LONG, long);
    SIMPLE(MPI_LONG_LONG, long long);
    SIMPLE(MPI_DOUBLE, double);
    SIMPLE(MPI_INT64_T, int64_t);
    SIMPLE(MPI_AINT, MPI_Aint);
    SIMPLE(MPI_OFFSET, MPI_Offset);
    SIMPLE(MPI_COUNT, MPI_Count);
    SIMPLE(MPI_LONG_DOUBLE, long double);
// Open MPI 5 packs complex numbers as if there were no gaps between them. Both versions of Open MPI overrun
// their own memory when a message is cut within a value of 32 bytes.
#if !defined(OPEN_MPI) || OMPI_MAJOR_VERSION < 5
    SIMPLE(MPI_C_FLOAT_COMPLEX, float _Complex);
    SIMPLE(MPI_C_DOUBLE_COMPLEX, double _Complex);
#endif
#ifndef OPEN_MPI
    SIMPLE(MPI_C_LONG_DOUBLE_COMPLEX, long double _Complex);
#endif
    PAIR(MPI_FLOAT_INT, float);
    PAIR(MPI_DOUBLE_INT, double);
    PAIR(MPI_LONG_INT, long);
    PAIR(MPI_2INT, int);
    PAIR(MPI_SHORT_INT, short);
    PAIR(MPI_LONG_DOUBLE_INT, long double);
    // Types of Fortran that have no name; not every library was built with Fortran.
    MPI_Datatype t;
    if (MPI_Type_create_f90_integer(9, &t) == MPI_SUCCESS) add_simple("f90_integer", t, 4, 4);
    if (MPI_Type_create_f90_real(15, 300, &t) == MPI_SUCCESS) add_simple("f90_real", t, 8, 8);
#if !defined(OPEN_MPI) || OMPI_MAJOR_VERSION < 5
    if (MPI_Type_create_f90_complex(6, 30, &t) == MPI_SUCCESS) add_simple("f90_complex", t, 8, 4);
#endif
}

static struct node *leaf_node(const struct leaf *leaf) {
    struct node *n = node_new(LEAF, NULL);
    n->leaf = leaf;
    n->runs = keep(sizeof leaf->run);
    memcpy(n->runs, leaf->run, sizeof leaf->run);
    n->run_count = leaf->runs;
    n->size = leaf->size;
    n->ub = leaf->extent;
    n->end = leaf->run[leaf->runs - 1].at + leaf->run[leaf->runs - 1].bytes;
    n->has_bounds = n->bounds_agree = n->true_bounds_agree = 1;
    n->align = leaf->align;
    n->grain = leaf->grain;
    return n;
}

// ---- types that live longer than the others --------------------------------------------------------------

// Each slot holds a type for EPOCH trees, then another one.
enum { SLOTS = 12, EPOCH = 40 };
static struct {
    long epoch; // of the description; -1: there is none
    struct store store;
    struct node *node;
    MPI_Datatype type;
} pool[SLOTS];
static uint64_t pool_seed;
static long pool_time;  // number of the present tree
static int pool_filled; // a type of the pool is being drawn, which has none of the pool in it

static long epoch_of(int slot) { return (pool_time + slot * 7) / EPOCH; }

static struct node *draw_tree(int height);
static struct node *draw_nested(int height, int is_root);

// A type of the pool. Both ranks of a pair draw the same one for a slot, each when it first needs it.
static struct node *pooled(void) {
    int slot = below(SLOTS);
    if (pool_filled || without[POOLED]) return NULL;
    if (pool[slot].epoch != epoch_of(slot)) {
        __typeof__(limits) kept_limits = limits;
        struct store *kept_store = store;
        uint64_t *kept = state, slots_own = word_of(pool_seed, epoch_of(slot) * SLOTS + slot);
        CHECK(pool[slot].type == MPI_DATATYPE_NULL, "a type of an earlier epoch is still there");
        pool[slot].epoch = epoch_of(slot);
        store = &pool[slot].store;
        store_clear(store);
        state = &slots_own;
        limits.bytes = 2000;
        limits.runs = 200;
        limits.span = 8000;
        limits.may_overlap = 0;
        limits.grain = 0;
        pool_filled = 1;
        pool[slot].node = draw_tree(between(1, 3));
        pool_filled = 0;
        store = kept_store;
        limits = kept_limits;
        state = kept;
    }
    struct node *from = pool[slot].node;
    if (limits.grain && from->grain != limits.grain) return NULL;
    if (from->size > limits.bytes || from->run_count > limits.runs) return NULL;
    if (from->end - from->first > limits.span || size_of(extent_of(from)) > limits.span) return NULL;
    struct node *n = node_new(POOLED, NULL);
    *n = *from;
    n->shape = POOLED;
    n->slot = slot;
    n->inners = 1;
    n->inner[0] = from;
    return n;
}

// ---- drawing ---------------------------------------------------------------------------------------------

// How many items of a type the limits allow in a row.
static long room_for(const struct node *n) {
    long most = limits.bytes;
    if (n->size) most = least_of(most, limits.bytes / n->size);
    if (n->run_count && !is_dense(n)) most = least_of(most, limits.runs / n->run_count);
    if (extent_of(n)) most = least_of(most, limits.span / size_of(extent_of(n)));
    return most;
}

static long some(long most) { return chance(4) ? 0 : magnitude(most); }

// Displacements of blocks, in units of the inner type's extent or, if `in_bytes`, multiples of its alignment.
// Unless items may overlap, the blocks lie one behind the other in memory, in any order and with gaps.
static void arrange(struct node *n, int in_bytes) {
    int *order = scratch((n->parts + 1) * sizeof *order);
    for (int b = 0; b < n->parts; b++) order[b] = b;
    if (chance(50)) for (int b = n->parts; b > 1; b--) {
        int other = below(b), kept = order[b - 1];
        order[b - 1] = order[other];
        order[other] = kept;
    }
    int backwards = chance(15), is_tight = chance(20), spread = chance(10) ? 40 : 4;
    long cursor = between(-40, 40) * n->inner[0]->align;
    n->places = keep((n->parts + 1) * sizeof *n->places);
    for (int k = 0; k < n->parts; k++) {
        int b = order[backwards ? n->parts - 1 - k : k];
        struct node *inner = n->inner[n->shape == STRUCT ? b : 0];
        long count = n->lengths ? n->lengths[b] : n->length, extent = extent_of(inner);
        long unit = in_bytes ? inner->align : size_of(extent), sign = !in_bytes && extent < 0 ? -1 : 1;
        long low = 0, high = 0, last = (count - 1) * extent;
        if (count && inner->size) {
            low = inner->first + least_of(0, last);
            high = inner->end + most_of(0, last);
        }
        if (!unit) unit = 1;
        long place = round_up(cursor - low, unit) / unit;
        if (limits.may_overlap && chance(60)) place = between(-20, 20);
        n->places[b] = sign * place * (in_bytes ? unit : 1);
        cursor = place * unit + high + (is_tight ? 0 : below(spread) * unit);
    }
    free(order);
}

static void draw_stride(struct node *n, int in_bytes) {
    struct node *inner = n->inner[0];
    long extent = size_of(extent_of(inner)), span = inner->end - inner->first, length = n->length;
    // Where items are longer than their extent, as those of interleaved columns, so is a block.
    long least = length + (extent && span > extent && chance(70) ? (span - 1) / extent : 0);
    long stride = least + (chance(30) ? 0 : magnitude(8));
    if (limits.may_overlap && chance(60)) stride = below(length + 2);
    if (in_bytes) {
        stride *= extent;
        if (chance(50)) stride += below(6) * inner->align;
    }
    n->stride = chance(25) ? -stride : stride;
}

static void draw_bounds(struct node *n) {
    struct node *inner = n->inner[0];
    long align = inner->align, whole = round_up(most_of(inner->end - inner->first, 1), align);
    long before = inner->first - below(64), within = inner->first + below(16);
    long lowers[] = {inner->lb, inner->first, 0, before, within, -below(200)};
    n->length = lowers[below(6)];
    long more = whole + below(6) * align, little = between(1, 4) * align, much = whole + below(100) * align;
    long extents[] = {whole, whole, more, more, little, much};
    n->stride = extents[below(6)];
    if (limits.may_overlap && chance(10)) n->stride = 0;
    if (chance(10)) n->stride = -n->stride;
}

static struct node *resized(struct node *inner) {
    struct node *n = node_new(RESIZED, inner);
    draw_bounds(n);
    return resolve(n) ? n : NULL;
}

// How many elements an array may have, of which a part is taken.
static long array_room(const struct node *element) {
    long most = least_of(4000, limits.span / extent_of(element));
    return least_of(most, 4 * limits.runs / most_of(element->run_count, 1));
}

static int draw_dims(struct node *n, long most) {
    n->parts = between(1, n->shape == DARRAY ? 3 : 4);
    n->order = chance(50) ? MPI_ORDER_C : MPI_ORDER_FORTRAN;
    for (int d = 0; d < n->parts; d++) {
        n->sizes[d] = magnitude(n->parts == 1 ? least_of(most, 300) : least_of(most, 12));
        if (n->sizes[d] < 1) return 0;
        most /= n->sizes[d];
    }
    return 1;
}

static void draw_lengths(struct node *n, long most) {
    long left = most, mean = n->parts ? most_of(1, most / n->parts) : 0;
    long same = chance(30) ? magnitude(mean) : -1;
    n->lengths = keep((n->parts + 1) * sizeof *n->lengths);
    for (int b = 0; b < n->parts; b++) {
        n->lengths[b] = least_of(left, same >= 0 ? same : chance(15) ? 0 : magnitude(mean));
        left -= n->lengths[b];
    }
}

static struct node *draw_struct(struct node *inner, int height) {
    struct node *n = node_new(STRUCT, inner);
    n->inners = n->parts = chance(3) ? 0 : between(1, MEMBERS);
    n->lengths = keep(MEMBERS * sizeof *n->lengths);
    long left = limits.bytes, runs = limits.runs;
    __typeof__(limits) kept = limits;
    for (int b = 0; b < n->parts; b++) {
        limits.bytes = most_of(left, 0) / (n->parts - b);
        limits.runs = most_of(runs, 0) / (n->parts - b);
        if (b) n->inner[b] = draw_nested(below(height), 0);
        long most = least_of(room_for(n->inner[b]), 1 + limits.bytes / 2);
        n->lengths[b] = some(most);
        left -= n->lengths[b] * n->inner[b]->size;
        runs -= n->lengths[b] * n->inner[b]->run_count;
        limits = kept;
    }
    arrange(n, 1);
    if (!resolve(n)) return NULL;
    return n->bounds_agree ? n : resized(n);
}

// A matrix, column by column: its elements fill its memory without a gap, but in another order.
static struct node *draw_transposed(struct node *element) {
    long most = room_for(element), rows, columns;
    if (!element->size || extent_of(element) <= 0 || most < 4) return NULL;
    rows = between(2, least_of(most / 2, 12));
    columns = between(2, least_of(most / rows, 12));
    struct node *column = node_new(VECTOR, element), *next = node_new(RESIZED, column);
    column->parts = rows;
    column->length = 1;
    column->stride = columns;
    if (!resolve(column)) return NULL;
    next->length = column->lb;
    next->stride = extent_of(element);
    struct node *all = node_new(chance(50) ? CONTIGUOUS : VECTOR, next);
    all->parts = 1;
    all->length = columns;
    return resolve(next) && resolve(all) ? all : NULL;
}

// A type around an inner one; NULL where what was drawn is beyond the limits.
static struct node *draw_around(struct node *inner, int height, int is_root) {
    enum shape shape = between(CONTIGUOUS, DUP);
    if (without[shape]) return NULL;
    if (chance(4) && !is_left_out("transposed")) return draw_transposed(inner);
    long extent = extent_of(inner), most = room_for(inner);
    // What is inside others leaves them something to do.
    if (!is_root && most > 16) { long root = 4; while (root * root < most) root++; most = root; }
    if (most < 1) return NULL;
    struct node *n = node_new(shape, inner);
    n->is_committed = chance(20);
    n->large = chance(20) && !without_large;
    n->fate = chance(70) ? FREED_AT_ONCE : chance(60) ? FREED_LATER : FREED_WITH_PARENT;
    switch (shape) {
    case CONTIGUOUS: n->length = some(most); break;
    case VECTOR:
    case HVECTOR:
        n->parts = some(least_of(most, 3000));
        n->length = some(most / most_of(n->parts, 1));
        draw_stride(n, shape == HVECTOR);
        break;
    case INDEXED:
    case HINDEXED:
        n->parts = some(least_of(most, chance(10) ? 1000 : 30));
        draw_lengths(n, most);
        arrange(n, shape == HINDEXED);
        break;
    case INDEXED_BLOCK:
    case HINDEXED_BLOCK:
        n->parts = some(least_of(most, chance(10) ? 1000 : 30));
        n->length = some(most / most_of(n->parts, 1));
        arrange(n, shape == HINDEXED_BLOCK);
        break;
    case STRUCT: {
        struct node *made = draw_struct(inner, height);
        if (!made) return NULL;
        made->is_committed = n->is_committed;
        made->large = n->large;
        made->fate = n->fate;
        return made;
    }
    case SUBARRAY:
        if (extent <= 0 || !inner->size || !draw_dims(n, array_room(inner))) return NULL;
        for (int d = 0; d < n->parts; d++) {
            n->subsizes[d] = between(1, n->sizes[d]);
            n->starts[d] = below(n->sizes[d] - n->subsizes[d] + 1);
        }
        break;
    case DARRAY:
        if (extent <= 0 || !inner->size || !draw_dims(n, array_room(inner))) return NULL;
        n->processes = 1;
        for (int d = 0; d < n->parts; d++) {
            static const int kinds[] = {MPI_DISTRIBUTE_BLOCK, MPI_DISTRIBUTE_CYCLIC, MPI_DISTRIBUTE_NONE};
            n->distribs[d] = kinds[below(3)];
            n->grid[d] = n->distribs[d] == MPI_DISTRIBUTE_NONE ? 1 : between(1, 3);
            n->processes *= n->grid[d];
            n->dargs[d] = MPI_DISTRIBUTE_DFLT_DARG;
            if (n->distribs[d] == MPI_DISTRIBUTE_BLOCK && chance(40))
                n->dargs[d] = (n->sizes[d] + n->grid[d] - 1) / n->grid[d] + below(3);
            if (n->distribs[d] == MPI_DISTRIBUTE_CYCLIC && chance(60)) n->dargs[d] = between(1, 4);
        }
        n->process = below(n->processes);
        break;
    case RESIZED: draw_bounds(n); break;
    default: break;
    }
    return resolve(n) ? n : NULL;
}

static struct node *draw_leaf(void) {
    struct node *n = chance(12) ? pooled() : NULL;
    for (int attempt = 0; !n && attempt < 10; attempt++) {
        const struct leaf *leaf = chance(15) ? byte_leaf : &leaves[below(leaf_count)];
        if (leaf->size > limits.bytes || leaf->runs > limits.runs) continue;
        n = leaf_node(leaf);
        if (limits.grain && n->grain != limits.grain) n = NULL;
    }
    if (n) return n;
    for (int i = 0; i < leaf_count && limits.grain; i++)
        if (leaves[i].grain == limits.grain) return leaf_node(&leaves[i]);
    return leaf_node(byte_leaf);
}

static struct node *draw_nested(int height, int is_root) {
    if (!height) return draw_leaf();
    struct node *inner = draw_nested(height - 1, 0), *n = NULL;
    for (int attempt = 0; !n && attempt < 6; attempt++) n = draw_around(inner, height, is_root);
    return n ? n : inner;
}

static struct node *draw_tree(int height) {
    struct node *tree = draw_nested(height, 1);
    return tree->size || chance(30) ? tree : draw_nested(height, 1); // less often one without data
}

// A tree whose items have so many bytes: items of a smaller one and the rest as MPI_BYTE.
static struct node *draw_fitting(long bytes, int height) {
    __typeof__(limits) kept = limits;
    struct node *tree, *n = NULL;
    limits.bytes = most_of(bytes, 1);
    for (int attempt = 0; !n && attempt < 6; attempt++) {
        tree = draw_tree(height);
        if (tree->size == bytes) n = tree;
        if (!tree->size || tree->size >= bytes || limits.runs < 2) continue;
        long items = magnitude(room_for(tree)), rest = bytes - items * tree->size;
        n = node_new(rest ? STRUCT : CONTIGUOUS, tree);
        n->length = items;
        if (rest) {
            int at = below(2); // of the rest
            n->inners = n->parts = 2;
            n->inner[at] = leaf_node(byte_leaf);
            n->inner[!at] = tree;
            n->lengths = keep(2 * sizeof *n->lengths);
            n->lengths[at] = rest;
            n->lengths[!at] = items;
            arrange(n, 1);
        }
        if (!resolve(n)) n = NULL;
        else if (!n->bounds_agree) n = resized(n);
    }
    if (!n) {
        n = node_new(CONTIGUOUS, leaf_node(byte_leaf));
        n->length = bytes;
        if (!resolve(n)) FAIL("%ld bytes are beyond the limits", bytes);
    }
    limits = kept;
    return n;
}

// ---- making ----------------------------------------------------------------------------------------------

// How the program frees handles: at once, in one way or another; later; or when another type is freed.
static void release(MPI_Datatype type);
static void release_later(MPI_Datatype type);
static void release_with(MPI_Datatype parent, MPI_Datatype type);

static int is_made(const struct node *n) { return n->shape != LEAF && n->shape != POOLED; }

// The constructors that take large counts, where the MPI library has them.
#if MPI_VERSION >= 4 && !defined(OPEN_MPI)
enum { LARGE_CONSTRUCTORS = 1 };

static MPI_Count *counts(const long *from, int count) {
    MPI_Count *to = keep((count + 1) * sizeof *to);
    for (int i = 0; i < count; i++) to[i] = from[i];
    return to;
}

static MPI_Count *counts_of_dims(const int *from) {
    MPI_Count *to = keep(DIMS * sizeof *to);
    for (int i = 0; i < DIMS; i++) to[i] = from[i];
    return to;
}

static void construct_large(struct node *n, MPI_Datatype *inner, MPI_Datatype *t) {
    int parts = n->parts;
    MPI_Count *lengths = n->lengths ? counts(n->lengths, parts) : NULL;
    MPI_Count *places = n->places ? counts(n->places, parts) : NULL;
    switch (n->shape) {
    case CONTIGUOUS: OK(MPI_Type_contiguous_c(n->length, *inner, t)); break;
    case VECTOR: OK(MPI_Type_vector_c(parts, n->length, n->stride, *inner, t)); break;
    case HVECTOR: OK(MPI_Type_create_hvector_c(parts, n->length, n->stride, *inner, t)); break;
    case INDEXED: OK(MPI_Type_indexed_c(parts, lengths, places, *inner, t)); break;
    case HINDEXED: OK(MPI_Type_create_hindexed_c(parts, lengths, places, *inner, t)); break;
    case INDEXED_BLOCK: OK(MPI_Type_create_indexed_block_c(parts, n->length, places, *inner, t)); break;
    case HINDEXED_BLOCK: OK(MPI_Type_create_hindexed_block_c(parts, n->length, places, *inner, t)); break;
    case STRUCT: OK(MPI_Type_create_struct_c(parts, lengths, places, inner, t)); break;
    case SUBARRAY:
        OK(MPI_Type_create_subarray_c(parts, counts_of_dims(n->sizes), counts_of_dims(n->subsizes),
                                      counts_of_dims(n->starts), n->order, *inner, t));
        break;
    case DARRAY:
        OK(MPI_Type_create_darray_c(n->processes, n->process, parts, counts_of_dims(n->sizes), n->distribs,
                                    n->dargs, n->grid, n->order, *inner, t));
        break;
    case RESIZED: OK(MPI_Type_create_resized_c(*inner, n->length, n->stride, t)); break;
    default: OK(MPI_Type_dup(*inner, t));
    }
}
#else
enum { LARGE_CONSTRUCTORS = 0 };
static void construct_large(struct node *n, MPI_Datatype *inner, MPI_Datatype *t) {
    (void)n, (void)inner, (void)t;
}
#endif

static int *ints(const long *from, int count) {
    int *to = keep((count + 1) * sizeof *to);
    for (int i = 0; i < count; i++) to[i] = from[i];
    return to;
}

static MPI_Aint *addresses(const long *from, int count) {
    MPI_Aint *to = keep((count + 1) * sizeof *to);
    for (int i = 0; i < count; i++) to[i] = from[i];
    return to;
}

static void construct(struct node *n, MPI_Datatype *inner, MPI_Datatype *t) {
    int parts = n->parts, *lengths = n->lengths ? ints(n->lengths, parts) : NULL;
    int *places = n->places ? ints(n->places, parts) : NULL; // in extents
    MPI_Aint *bytes = n->places ? addresses(n->places, parts) : NULL;
    switch (n->shape) {
    case CONTIGUOUS: OK(MPI_Type_contiguous(n->length, *inner, t)); break;
    case VECTOR: OK(MPI_Type_vector(parts, n->length, n->stride, *inner, t)); break;
    case HVECTOR: OK(MPI_Type_create_hvector(parts, n->length, n->stride, *inner, t)); break;
    case INDEXED: OK(MPI_Type_indexed(parts, lengths, places, *inner, t)); break;
    case HINDEXED: OK(MPI_Type_create_hindexed(parts, lengths, bytes, *inner, t)); break;
    case INDEXED_BLOCK: OK(MPI_Type_create_indexed_block(parts, n->length, places, *inner, t)); break;
    case HINDEXED_BLOCK: OK(MPI_Type_create_hindexed_block(parts, n->length, bytes, *inner, t)); break;
    case STRUCT: OK(MPI_Type_create_struct(parts, lengths, bytes, inner, t)); break;
    case SUBARRAY:
        OK(MPI_Type_create_subarray(parts, n->sizes, n->subsizes, n->starts, n->order, *inner, t));
        break;
    case DARRAY:
        OK(MPI_Type_create_darray(n->processes, n->process, parts, n->sizes, n->distribs, n->dargs, n->grid,
                                  n->order, *inner, t));
        break;
    case RESIZED: OK(MPI_Type_create_resized(*inner, n->length, n->stride, t)); break;
    default: OK(MPI_Type_dup(*inner, t));
    }
}

// The MPI library says of the type what the typemap says.
static void compare(const struct node *n, MPI_Datatype t) {
    int size;
    MPI_Aint lb, extent, first, span;
    OK(MPI_Type_size(t, &size));
    OK(MPI_Type_get_extent(t, &lb, &extent));
    OK(MPI_Type_get_true_extent(t, &first, &span));
    int is_good = size == n->size && (!n->bounds_agree || (lb == n->lb && extent == extent_of(n)));
    if (n->size && n->true_bounds_agree) is_good &= first == n->first && span == n->end - n->first;
    if (is_good) return;
    char *text = NULL;
    size_t length;
    FILE *to = open_memstream(&text, &length);
    CHECK(to, "memory");
    describe(to, n);
    fclose(to);
    FAIL("the MPI library and the typemap differ: size %d, %ld; lb %ld, %ld; extent %ld, %ld%s; "
         "true lb %ld, %ld; true extent %ld, %ld: %s",
         size, n->size, (long)lb, n->lb, (long)extent, extent_of(n), n->bounds_agree ? "" : " (uncertain)",
         (long)first, n->first, (long)span, n->end - n->first, text);
}

static MPI_Datatype make(struct node *n) {
    MPI_Datatype inner[MEMBERS], t = MPI_DATATYPE_NULL;
    if (n->shape == LEAF) return n->leaf->type;
    if (n->shape == POOLED) {
        if (pool[n->slot].type == MPI_DATATYPE_NULL) {
            pool[n->slot].type = make(n->inner[0]);
            if (!is_made(n->inner[0])) OK(MPI_Type_dup(n->inner[0]->leaf->type, &pool[n->slot].type));
            OK(MPI_Type_commit(&pool[n->slot].type));
        }
        return pool[n->slot].type;
    }
    for (int i = 0; i < n->inners; i++) inner[i] = make(n->inner[i]);
    if (LARGE_CONSTRUCTORS && n->large) construct_large(n, inner, &t);
    else construct(n, inner, &t);
    for (int i = 0; i < n->inners; i++) {
        if (!is_made(n->inner[i])) continue;
        switch (n->inner[i]->fate) {
        case FREED_AT_ONCE: release(inner[i]); break;
        case FREED_LATER: release_later(inner[i]); break;
        default: release_with(t, inner[i]);
        }
    }
    compare(n, t);
    if (n->is_committed) OK(MPI_Type_commit(&t));
    return t;
}
#endif
