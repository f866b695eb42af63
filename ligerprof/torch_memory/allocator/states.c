/* The decisions of states.py, compiled: sizes and addresses are in units of 512 bytes. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A piece of a segment, with its neighbors there; -1 if there is none. */
typedef struct {
    int64_t address, size;
    int32_t previous, next;
    int32_t is_free, pool;
} Block;

typedef struct {
    int64_t size, address;
    int32_t block;
} Entry;

/* Free blocks sorted by size and address; `mapped` and `last` are the end of an expandable segment and its last block. */
typedef struct {
    Entry *entries;
    int64_t count, room, mapped;
    int32_t last;
} Pool;

/* compiled.py declares the same fields up to `min_own`. */
typedef struct {
    int64_t allocated, reserved, highest, highest_reserved;
    int64_t limit, expandable, next_address, gap;
    int64_t smallest_rest[2], segment[2];
    int64_t small, round, min_own;
    Pool pools[2];
    Block *blocks;
    int32_t *held, *own;
    int64_t block_count, block_room, held_count, held_room, own_room;
    int32_t spare;
} State;

enum { DONE = 0, NO_MEMORY = -1 };

static int reserve(void **table, int64_t *room, int64_t wanted, size_t each)
{
    if (wanted <= *room)
        return 1;
    int64_t more = 2 * wanted + 64;
    void *moved = realloc(*table, (size_t)more * each);
    if (!moved)
        return 0;
    *table = moved;
    *room = more;
    return 1;
}

/* The first entry that is not less; without branches, which no processor could predict. */
static int64_t find(const Pool *pool, int64_t size, int64_t address)
{
    const Entry *first = pool->entries;
    int64_t count = pool->count;
    while (count > 0) {
        int64_t half = count / 2;
        const Entry *entry = first + half;
        int less = (entry->size < size) | ((entry->size == size) & (entry->address < address));
        first = less ? entry + 1 : first;
        count = less ? count - half - 1 : half;
    }
    return first - pool->entries;
}

static void remove_at(Pool *pool, int64_t index)
{
    pool->count--;
    memmove(&pool->entries[index], &pool->entries[index + 1], (size_t)(pool->count - index) * sizeof(Entry));
}

/* Put a block in place of the entry at an index. */
static void replace_at(State *state, Pool *pool, int64_t index, int32_t number)
{
    Block *block = &state->blocks[number];
    Entry *entries = pool->entries;
    int64_t place = find(pool, block->size, block->address);
    if (place <= index) {
        memmove(&entries[place + 1], &entries[place], (size_t)(index - place) * sizeof(Entry));
    } else {
        place--;
        memmove(&entries[index], &entries[index + 1], (size_t)(place - index) * sizeof(Entry));
    }
    entries[place] = (Entry){block->size, block->address, number};
    block->is_free = 1;
}

static int64_t index_of(const State *state, int32_t number)
{
    const Block *block = &state->blocks[number];
    return find(&state->pools[block->pool], block->size, block->address);
}

static int put(State *state, int32_t number)
{
    Block *block = &state->blocks[number];
    Pool *pool = &state->pools[block->pool];
    if (!reserve((void **)&pool->entries, &pool->room, pool->count + 1, sizeof(Entry)))
        return 0;
    int64_t index = find(pool, block->size, block->address);
    memmove(&pool->entries[index + 1], &pool->entries[index], (size_t)(pool->count - index) * sizeof(Entry));
    pool->entries[index] = (Entry){block->size, block->address, number};
    pool->count++;
    block->is_free = 1;
    return 1;
}

static int32_t new_block(State *state, int64_t address, int64_t size, int32_t pool, int32_t previous, int32_t next)
{
    int32_t number = state->spare;
    if (number >= 0) {
        state->spare = state->blocks[number].next;
    } else {
        if (!reserve((void **)&state->blocks, &state->block_room, state->block_count + 1, sizeof(Block)))
            return -1;
        number = (int32_t)state->block_count++;
    }
    state->blocks[number] = (Block){address, size, previous, next, 0, pool};
    if (previous >= 0)
        state->blocks[previous].next = number;
    if (next >= 0)
        state->blocks[next].previous = number;
    return number;
}

static void drop_block(State *state, int32_t number)
{
    state->blocks[number].next = state->spare;
    state->spare = number;
}

/* Take the next block into this one. */
static void absorb_next(State *state, int32_t number)
{
    Block *block = &state->blocks[number];
    int32_t following = block->next;
    block->size += state->blocks[following].size;
    block->next = state->blocks[following].next;
    if (block->next >= 0)
        state->blocks[block->next].previous = number;
    if (state->pools[block->pool].last == following)
        state->pools[block->pool].last = number;
    drop_block(state, following);
}

static int free_block(State *state, int32_t number)
{
    Block *block = &state->blocks[number];
    Pool *pool = &state->pools[block->pool];
    int64_t index = -1;
    state->allocated -= block->size;
    if (block->next >= 0 && state->blocks[block->next].is_free) {
        index = index_of(state, block->next);
        absorb_next(state, number);
    }
    if (block->previous >= 0 && state->blocks[block->previous].is_free) {
        if (index >= 0)
            remove_at(pool, index);
        number = block->previous;
        index = index_of(state, number);
        absorb_next(state, number);
    }
    if (index < 0)
        return put(state, number);
    replace_at(state, pool, index, number);
    return 1;
}

static int has_room(const State *state, int64_t wanted)
{
    return state->limit < 0 || state->reserved + wanted <= state->limit;
}

/* Give back every segment that holds nothing. */
static void give_back(State *state)
{
    for (int number = 0; number < 2; number++) {
        Pool *pool = &state->pools[number];
        for (int64_t index = pool->count - 1; index >= 0; index--) {
            Entry entry = pool->entries[index];
            Block *block = &state->blocks[entry.block];
            if (block->previous < 0 && block->next < 0) {
                remove_at(pool, index);
                drop_block(state, entry.block);
                state->reserved -= entry.size;
            }
        }
    }
}

/* Make a free block of at least `size`: a new segment, or more pages of the one that grows. */
static int64_t grow(State *state, int32_t which, int64_t size)
{
    Pool *pool = &state->pools[which];
    int64_t wanted;
    int32_t number;
    if (state->expandable) {
        int64_t page = state->segment[which];
        int32_t last = pool->last;
        int is_free = last >= 0 && state->blocks[last].is_free;
        int64_t missing = size - (is_free ? state->blocks[last].size : 0);
        wanted = (missing + page - 1) / page * page;
        if (!has_room(state, wanted))
            return size;
        if (is_free) {
            remove_at(pool, index_of(state, last));
            state->blocks[last].size += wanted;
            number = last;
        } else {
            number = new_block(state, pool->mapped, wanted, which, last, -1);
            pool->last = number;
        }
        pool->mapped += wanted;
    } else {
        wanted = state->segment[which];
        if (which && size >= state->min_own)
            wanted = (size + state->round - 1) / state->round * state->round;
        if (!has_room(state, wanted))
            give_back(state);
        if (!has_room(state, wanted))
            return size;
        state->next_address -= wanted + state->gap;
        number = new_block(state, state->next_address, wanted, which, -1, -1);
    }
    if (number < 0 || !put(state, number))
        return NO_MEMORY;
    state->reserved += wanted;
    if (state->reserved > state->highest_reserved)
        state->highest_reserved = state->reserved;
    return DONE;
}

/* Allocate a block; -1 if it fails, for the reason in `failure`. */
static int32_t allocate(State *state, int64_t size, int64_t *failure)
{
    int32_t which = size > state->small;
    Pool *pool = &state->pools[which];
    int64_t index = find(pool, size, INT64_MIN);
    /* the last block of the segment can grow: torch prefers one that cannot */
    if (state->expandable && index + 1 < pool->count && pool->entries[index].block == pool->last)
        index++;
    if (index == pool->count) {
        if ((*failure = grow(state, which, size)) != DONE)
            return -1;
        index = find(pool, size, INT64_MIN);
    }
    int32_t number = pool->entries[index].block;
    state->blocks[number].is_free = 0;
    int64_t left = state->blocks[number].size - size;
    if (left >= state->smallest_rest[which]) {
        int64_t behind = state->blocks[number].address + size;
        int32_t rest = new_block(state, behind, left, which, number, state->blocks[number].next);
        if (rest < 0) {
            *failure = NO_MEMORY;
            return -1;
        }
        state->blocks[number].size = size;
        if (pool->last == number)
            pool->last = rest;
        replace_at(state, pool, index, rest);
    } else {
        remove_at(pool, index);
    }
    state->allocated += state->blocks[number].size;
    if (state->allocated > state->highest)
        state->highest = state->allocated;
    return number;
}

/* A state without segments, from the fields that compiled.py declares. */
State *state_new(const State *fields, size_t bytes)
{
    State *state = calloc(1, sizeof(State));
    if (state) {
        memcpy(state, fields, bytes);
        state->spare = state->pools[0].last = state->pools[1].last = -1;
    }
    return state;
}

void state_delete(State *state)
{
    free(state->pools[0].entries);
    free(state->pools[1].entries);
    free(state->blocks);
    free(state->held);
    free(state->own);
    free(state);
}

/* Run operations as `AllocatorState.run` does; returns the size of a request that does not fit, or DONE, or NO_MEMORY. */
int64_t state_run(State *state, const int32_t *operations, int64_t count, const int64_t *sizes, int64_t size_count)
{
    int64_t made = 0, failure = DONE;
    if (!reserve((void **)&state->own, &state->own_room, size_count, sizeof(int32_t)))
        return NO_MEMORY;
    int32_t *own = state->own;
    for (int64_t index = 0; index < count; index++) {
        int32_t operation = operations[index];
        if (operation == 0) {
            if ((own[made] = allocate(state, sizes[made], &failure)) < 0)
                return failure;
            made++;
            continue;
        }
        int32_t *place = operation > 0 ? &own[operation - 1] : &state->held[-operation - 1];
        if (!free_block(state, *place))
            return NO_MEMORY;
        *place = -1;
    }
    /* what is left takes the places of what was freed, then new ones */
    int64_t kept = 0, hole = 0;
    for (int64_t index = 0; index < made; index++) {
        if (own[index] < 0)
            continue;
        while (hole < state->held_count && state->held[hole] >= 0)
            hole++;
        if (hole == state->held_count) {
            if (!reserve((void **)&state->held, &state->held_room, hole + 1, sizeof(int32_t)))
                return NO_MEMORY;
            state->held_count++;
        }
        state->held[hole] = own[index];
    }
    for (int64_t index = 0; index < state->held_count; index++)
        if (state->held[index] >= 0)
            state->held[kept++] = state->held[index];
    state->held_count = kept;
    return DONE;
}

/* Write what decides about coming events, if there is room; returns how many numbers that takes. */
int64_t state_key(const State *state, int64_t *numbers, int64_t room)
{
    int64_t wanted = 4 + 2 * (state->pools[0].count + state->pools[1].count) + state->held_count;
    if (wanted > room)
        return wanted;
    for (int which = 0; which < 2; which++) {
        const Pool *pool = &state->pools[which];
        *numbers++ = pool->count;
        *numbers++ = pool->mapped;
        for (int64_t index = 0; index < pool->count; index++) {
            *numbers++ = pool->entries[index].size;
            *numbers++ = pool->entries[index].address;
        }
    }
    for (int64_t index = 0; index < state->held_count; index++)
        *numbers++ = state->blocks[state->held[index]].address;
    return wanted;
}
