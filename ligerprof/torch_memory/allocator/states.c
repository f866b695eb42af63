/* The decisions of long_runs.py, compiled: sizes and addresses are in units of 512 bytes. */

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

/* Free blocks of similar sizes, sorted by size and address. */
typedef struct {
    Entry *entries;
    int64_t count, room;
} Bucket;

/* Each power of two has 2^FINE buckets; bucket after bucket, all sizes are in order. */
enum { FINE = 4, BUCKETS = (64 - FINE) << FINE, WORD = 64 };

/* Free blocks; a bit of `filled` is set for each bucket that has some. `mapped` and `last` are the end of an expandable
 * segment and its last block. */
typedef struct {
    Bucket buckets[BUCKETS];
    uint64_t filled[BUCKETS / WORD];
    int64_t count, mapped;
    int32_t last;
} Pool;

/* Of an entry; the bucket is BUCKETS if there is none. */
typedef struct {
    int32_t bucket;
    int64_t index;
} Place;

/* states.py declares the same fields up to `min_own`. `changes` counts changes of the large pool that last: segments
 * that are made or given back, held blocks that a run frees, and blocks that it leaves. */
typedef struct {
    int64_t allocated, reserved, highest, highest_reserved, changes;
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

static int32_t bucket_of(int64_t size)
{
    if (size < 1 << FINE)
        return (int32_t)size;
    int32_t power = WORD - 1 - __builtin_clzll((uint64_t)size);
    return ((power - FINE) << FINE) + (int32_t)(size >> (power - FINE));
}

/* The first entry of a bucket from this one on. */
static Place first_from(const Pool *pool, int32_t bucket)
{
    int32_t word = bucket / WORD;
    if (word < BUCKETS / WORD) {
        uint64_t filled = pool->filled[word] & (~(uint64_t)0 << (bucket % WORD));
        while (!filled && ++word < BUCKETS / WORD)
            filled = pool->filled[word];
        if (filled)
            return (Place){word * WORD + __builtin_ctzll(filled), 0};
    }
    return (Place){BUCKETS, 0};
}

static Place following(const Pool *pool, Place place)
{
    place.index++;
    return place.index < pool->buckets[place.bucket].count ? place : first_from(pool, place.bucket + 1);
}

static Entry *entry_at(const Pool *pool, Place place)
{
    return &pool->buckets[place.bucket].entries[place.index];
}

/* The first entry of the bucket that is not less; without branches, which no processor could predict. */
static int64_t find(const Bucket *bucket, int64_t size, int64_t address)
{
    const Entry *first = bucket->entries;
    int64_t count = bucket->count;
    while (count > 0) {
        int64_t half = count / 2;
        const Entry *entry = first + half;
        int less = (entry->size < size) | ((entry->size == size) & (entry->address < address));
        first = less ? entry + 1 : first;
        count = less ? count - half - 1 : half;
    }
    return first - bucket->entries;
}

static void remove_at(Pool *pool, Place place)
{
    Bucket *bucket = &pool->buckets[place.bucket];
    Entry *entry = &bucket->entries[place.index];
    pool->count--;
    bucket->count--;
    memmove(entry, entry + 1, (size_t)(bucket->count - place.index) * sizeof(Entry));
    if (!bucket->count)
        pool->filled[place.bucket / WORD] &= ~((uint64_t)1 << (place.bucket % WORD));
}

/* Take a free block out of its pool. */
static void take(State *state, int32_t number)
{
    const Block *block = &state->blocks[number];
    Pool *pool = &state->pools[block->pool];
    int32_t bucket = bucket_of(block->size);
    remove_at(pool, (Place){bucket, find(&pool->buckets[bucket], block->size, block->address)});
}

static int put(State *state, int32_t number)
{
    Block *block = &state->blocks[number];
    Pool *pool = &state->pools[block->pool];
    int32_t which = bucket_of(block->size);
    Bucket *bucket = &pool->buckets[which];
    if (!reserve((void **)&bucket->entries, &bucket->room, bucket->count + 1, sizeof(Entry)))
        return 0;
    int64_t index = bucket->count ? find(bucket, block->size, block->address) : 0;
    Entry *entry = &bucket->entries[index];
    memmove(entry + 1, entry, (size_t)(bucket->count - index) * sizeof(Entry));
    *entry = (Entry){block->size, block->address, number};
    pool->filled[which / WORD] |= (uint64_t)1 << (which % WORD);
    bucket->count++;
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
    const Block *block = &state->blocks[number];
    state->allocated -= block->size;
    if (block->next >= 0 && state->blocks[block->next].is_free) {
        take(state, block->next);
        absorb_next(state, number);
    }
    if (block->previous >= 0 && state->blocks[block->previous].is_free) {
        number = block->previous;
        take(state, number);
        absorb_next(state, number);
    }
    return put(state, number);
}

static int has_room(const State *state, int64_t wanted)
{
    return state->limit < 0 || state->reserved + wanted <= state->limit;
}

/* Give back every segment that holds nothing. */
static void give_back(State *state)
{
    state->changes++;
    for (int number = 0; number < 2; number++) {
        Pool *pool = &state->pools[number];
        Place place = first_from(pool, 0);
        while (place.bucket < BUCKETS) {
            Entry entry = *entry_at(pool, place);
            const Block *block = &state->blocks[entry.block];
            if (block->previous < 0 && block->next < 0) {
                remove_at(pool, place);
                drop_block(state, entry.block);
                state->reserved -= entry.size;
                place.index--;
            }
            place = following(pool, place);
        }
    }
}

/* Make a free block of at least `size`: a new segment, or more pages of the one that grows. */
static int64_t grow(State *state, int32_t which, int64_t size)
{
    Pool *pool = &state->pools[which];
    int64_t wanted = state->segment[which];
    int32_t number;
    if (which && size >= state->min_own)
        wanted = (size + state->round - 1) / state->round * state->round;
    if (state->expandable) {
        int64_t page = state->segment[which];
        /* torch asks for room for a segment of its own first */
        if (!has_room(state, wanted))
            return size;
        int32_t last = pool->last;
        int is_free = last >= 0 && state->blocks[last].is_free;
        int64_t missing = size - (is_free ? state->blocks[last].size : 0);
        wanted = (missing + page - 1) / page * page;
        if (!has_room(state, wanted))
            return size;
        if (is_free) {
            take(state, last);
            state->blocks[last].size += wanted;
            number = last;
        } else {
            number = new_block(state, pool->mapped, wanted, which, last, -1);
            pool->last = number;
        }
        pool->mapped += wanted;
    } else {
        if (!has_room(state, wanted))
            give_back(state);
        if (!has_room(state, wanted))
            return size;
        state->next_address -= wanted + state->gap;
        number = new_block(state, state->next_address, wanted, which, -1, -1);
    }
    if (number < 0 || !put(state, number))
        return NO_MEMORY;
    state->changes += which;
    state->reserved += wanted;
    if (state->reserved > state->highest_reserved)
        state->highest_reserved = state->reserved;
    return DONE;
}

/* The smallest free block of at least `size`, the first of them. */
static Place fitting(const Pool *pool, int64_t size)
{
    int32_t bucket = bucket_of(size);
    int64_t index = find(&pool->buckets[bucket], size, INT64_MIN);
    return index < pool->buckets[bucket].count ? (Place){bucket, index} : first_from(pool, bucket + 1);
}

/* Allocate a block; -1 if it fails, for the reason in `failure`. */
static int32_t allocate(State *state, int64_t size, int64_t *failure)
{
    int32_t which = size > state->small;
    Pool *pool = &state->pools[which];
    Place place = fitting(pool, size);
    /* the last block of the segment can grow: torch prefers one that cannot */
    if (state->expandable && place.bucket < BUCKETS && entry_at(pool, place)->block == pool->last) {
        Place other = following(pool, place);
        place = other.bucket < BUCKETS ? other : place;
    }
    if (place.bucket == BUCKETS) {
        if ((*failure = grow(state, which, size)) != DONE)
            return -1;
        place = fitting(pool, size);
    }
    int32_t number = entry_at(pool, place)->block;
    remove_at(pool, place);
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
        if (!put(state, rest)) {
            *failure = NO_MEMORY;
            return -1;
        }
    }
    state->allocated += state->blocks[number].size;
    if (state->allocated > state->highest)
        state->highest = state->allocated;
    return number;
}

/* A state without segments, from the fields that states.py declares. */
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
    for (int which = 0; which < 2; which++)
        for (int32_t bucket = 0; bucket < BUCKETS; bucket++)
            free(state->pools[which].buckets[bucket].entries);
    free(state->blocks);
    free(state->held);
    free(state->own);
    free(state);
}

/* Run operations as `AllocatorState.run` does, or only those of the small pool, if the others leave the large pool as it
 * is; returns the size of a request that does not fit, or DONE, or NO_MEMORY. */
int64_t state_run(State *state, const int32_t *operations, int64_t count, const int64_t *sizes, int64_t size_count,
                  int only_small)
{
    int64_t made = 0, failure = DONE;
    if (!reserve((void **)&state->own, &state->own_room, size_count, sizeof(int32_t)))
        return NO_MEMORY;
    int32_t *own = state->own;
    for (int64_t index = 0; index < count; index++) {
        int32_t operation = operations[index];
        if (operation == 0) {
            if (only_small && sizes[made] > state->small)
                own[made] = -1;
            else if ((own[made] = allocate(state, sizes[made], &failure)) < 0)
                return failure;
            made++;
            continue;
        }
        int32_t *place = operation > 0 ? &own[operation - 1] : &state->held[-operation - 1];
        /* of the large pool, and left out */
        if (*place < 0)
            continue;
        state->changes += operation < 0 && state->blocks[*place].pool;
        if (!free_block(state, *place))
            return NO_MEMORY;
        *place = -1;
    }
    /* what is left takes the places of what was freed, then new ones */
    int64_t kept = 0, hole = 0;
    for (int64_t index = 0; index < made; index++) {
        if (own[index] < 0)
            continue;
        state->changes += state->blocks[own[index]].pool;
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

/* Write the sizes of blocks that are held. */
void state_held_sizes(const State *state, const int32_t *places, int64_t count, int64_t *sizes)
{
    for (int64_t index = 0; index < count; index++)
        sizes[index] = state->blocks[state->held[places[index]]].size;
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
        for (Place place = first_from(pool, 0); place.bucket < BUCKETS; place = following(pool, place)) {
            *numbers++ = entry_at(pool, place)->size;
            *numbers++ = entry_at(pool, place)->address;
        }
    }
    for (int64_t index = 0; index < state->held_count; index++)
        *numbers++ = state->blocks[state->held[index]].address;
    return wanted;
}
