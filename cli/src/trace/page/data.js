// What the trace says, which part of it is looked at, and its sums.

const data = JSON.parse(document.getElementById("data").textContent);

// Cells come as columns; a column that is the same in all rows is one number.
function cells(columns) {
    const { rows, ...rest } = columns;
    const all = { rows };
    for (const [name, column] of Object.entries(rest)) {
        all[name] = Array.isArray(column) ? column : new Array(rows).fill(column ?? 0);
    }
    return all;
}
const messages = cells(data.messages);
const copies = cells(data.copies);
const calls = cells(data.calls);

const UNKNOWN = -1;
const NOT_RECORDED = "not recorded";

// Numbers as people read them.
const count = (number) => Math.round(number).toLocaleString("en-US");
const short = (number) =>
    number >= 1e9 ? (number / 1e9).toFixed(1) + "G"
    : number >= 1e6 ? (number / 1e6).toFixed(1) + "M"
    : number >= 1e4 ? (number / 1e3).toFixed(1) + "k"
    : count(number);
function digits(number) {
    return number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}
function size(bytes, many = digits) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (bytes >= 1024 && at < units.length - 1) {
        bytes /= 1024;
        at += 1;
    }
    return (at === 0 || Number.isInteger(bytes) ? bytes : many(bytes)) + " " + units[at];
}
// For cells of a matrix.
const sizeShort = (bytes) => size(bytes, (number) => number.toFixed(number >= 10 ? 0 : 1)).replace(/iB$/, "i");
function time(ns) {
    const negative = ns < 0 ? "−" : "";
    const many = Math.abs(ns);
    if (many >= 1e9) return negative + digits(many / 1e9) + " s";
    if (many >= 1e6) return negative + digits(many / 1e6) + " ms";
    if (many >= 1e3) return negative + digits(many / 1e3) + " µs";
    return negative + many + " ns";
}
const rate = (bytes, ns) => (ns > 0 ? digits(bytes / ns) + " GB/s" : "–");
const percent = (part, all) => (all > 0 ? ((100 * part) / all).toFixed(1) : "0.0") + " %";
// As short as it is exact.
const ms = (ns) => String(Number((ns / 1e6).toFixed(6)));

// Names of what cells are of.
const step = data.rank_step;
function rankName(group) {
    if (group === UNKNOWN || group === null || group === undefined) return "?";
    return step === 1 ? String(group) : `${group * step}–${group * step + step - 1}`;
}
// What is not known comes last.
const inOrder = (one, other) => (one === UNKNOWN) - (other === UNKNOWN) || one - other;
const hosts = new Set(data.places.map((place) => place.host));
function placeName(number) {
    const place = data.places[number];
    if (!place) return "any place";
    return hosts.size > 1 ? `${place.name} on ${place.host}` : place.name;
}
const routePath = data.routes.map((route) => route.paths.join(" + ") || NOT_RECORDED);
const linkName = (link) => `${placeName(link.from)} → ${placeName(link.to)}`;

// Class 0 has no bytes, class n those from 2^(n-1) on.
function sizeClass(bytes) {
    let at = 0;
    for (let rest = bytes; rest >= 1; rest /= 2) at += 1;
    return at;
}
const leastOf = (at) => (at === 0 ? 0 : 2 ** (at - 1));
const mostOf = (at) => 2 ** at - 1;
const className = (at) => (at === 0 ? "0 B" : at === 1 ? "1 B" : `${size(leastOf(at))} – <${size(2 ** at)}`);

// What is looked at: in the address after #, so that a view can be linked.
const FILTERS = ["call", "protocol", "path", "rank", "place", "min", "max", "from", "to"];
const OTHERS = ["by", "pair", "message", "view"];

function readState() {
    const given = new URLSearchParams(location.hash.slice(1));
    const state = {};
    for (const name of [...FILTERS, ...OTHERS]) {
        const value = given.get(name);
        if (value !== null && value !== "") state[name] = value;
    }
    return state;
}

function hashOf(state) {
    const given = new URLSearchParams();
    for (const name of [...FILTERS, ...OTHERS]) {
        if (state[name] !== undefined && state[name] !== "") given.set(name, state[name]);
    }
    return "#" + given.toString();
}

let state = readState();
const hashWith = (change) => hashOf({ ...state, ...change });
function go(change) {
    const hash = hashWith(change);
    // Setting the same again makes no event.
    if (hash !== location.hash) location.hash = hash;
}

const number = (text, otherwise) => {
    const value = Number(text);
    return text === undefined || !Number.isFinite(value) || value < 0 ? otherwise : value;
};

// The filter as it is applied: times and sizes go to the borders of bins. The window is what a timeline shows, which need
// not end there.
function applied() {
    const end = data.bins * data.width_ns;
    const from = Math.min(Math.round(number(state.from, 0) * 1e6), data.span_ns);
    const to = Math.max(from, Math.min(Math.round(number(state.to, end / 1e6) * 1e6), end));
    const first = Math.min(Math.floor(from / data.width_ns), data.bins - 1);
    const last = Math.min(Math.max(first, Math.ceil(to / data.width_ns) - 1), data.bins - 1);
    const least = sizeClass(number(state.min, 0));
    const most = state.max === undefined ? 64 : sizeClass(number(state.max, Infinity) === Infinity ? 2 ** 63 : Number(state.max));
    const rank = state.rank === undefined ? undefined : state.rank === "?" ? UNKNOWN : Math.floor(number(state.rank, 0) / step);
    return {
        call: state.call === undefined ? undefined : data.functions.indexOf(state.call),
        protocol: state.protocol === undefined ? undefined : data.protocols.indexOf(state.protocol),
        path: state.path,
        rank,
        place: state.place === undefined ? undefined : number(state.place, UNKNOWN),
        first,
        last,
        least,
        most,
        window: { from, to: to > from ? to : Math.min(from + data.width_ns, end) },
    };
}

// Whether a row of messages or copies is of what is looked at, whenever it was.
function passes(table, filter) {
    const isRoute = data.routes.map((route, at) =>
        (filter.path === undefined || routePath[at] === filter.path) &&
        (filter.place === undefined || (route.places ?? []).includes(filter.place)));
    const pass = new Uint8Array(table.rows);
    for (let row = 0; row < table.rows; row += 1) {
        pass[row] =
            (filter.call === undefined || table.call[row] === filter.call) &&
            (filter.protocol === undefined || table.protocol[row] === filter.protocol) &&
            (filter.rank === undefined || table.from[row] === filter.rank || table.to[row] === filter.rank) &&
            table.size[row] >= filter.least && table.size[row] <= filter.most && isRoute[table.route[row]];
    }
    return pass;
}

// Calls have neither size nor path: they go by function and rank.
function callsPass(filter) {
    const pass = new Uint8Array(calls.rows);
    for (let row = 0; row < calls.rows; row += 1) {
        pass[row] =
            (filter.call === undefined || calls.call[row] === filter.call) &&
            (filter.rank === undefined || calls.from[row] === filter.rank);
    }
    return pass;
}

// Calls of UCX. They are summed over the whole job, and have neither protocol nor path: they go by function, rank and size.
const ucx = data.ucp.map(([rank, call, name, fn, transports, size, many, bytes, ns, underWay]) =>
    ({ rank, call, name, fn, transports, size, count: many, bytes, ns, underWay }));
const ucxPass = (filter) => ucx.filter((row) =>
    (filter.call === undefined || row.call === filter.call) &&
    (filter.rank === undefined || row.rank === null || groupOf(row.rank) === filter.rank) &&
    row.size >= filter.least && row.size <= filter.most);

// Sums of rows that pass, by a name for each.
function sumBy(table, pass, filter, key) {
    const sums = new Map();
    for (let row = 0; row < table.rows; row += 1) {
        if (!pass[row] || table.count[row] === 0 || table.bin[row] < filter.first || table.bin[row] > filter.last) continue;
        const name = key(row);
        let sum = sums.get(name);
        if (sum === undefined) {
            sum = { count: 0, bytes: 0, timed: 0, ns: 0, longest: 0, row };
            sums.set(name, sum);
        }
        sum.count += table.count[row];
        sum.bytes += table.bytes[row];
        sum.timed += table.timed[row];
        sum.ns += table.ns[row];
        sum.longest = Math.max(sum.longest, table.longest[row]);
    }
    return sums;
}

const NOTHING = { count: 0, bytes: 0, timed: 0, ns: 0, longest: 0 };

// How many are under way in each bin in the mean, by a name (or several) for each row.
function underWay(table, pass, keys) {
    const found = new Map();
    for (let row = 0; row < table.rows; row += 1) {
        if (!pass[row]) continue;
        for (const key of keys(row)) {
            let lane = found.get(key);
            if (lane === undefined) {
                lane = { own: new Float64Array(data.bins), net: new Float64Array(data.bins) };
                found.set(key, lane);
            }
            lane.own[table.bin[row]] += table.own[row];
            lane.net[table.bin[row]] += table.net[row];
        }
    }
    for (const lane of found.values()) {
        let before = 0;
        lane.mean = lane.own.map((own, bin) => {
            const mean = before + own / data.width_ns;
            before += lane.net[bin];
            // Sums of fractions leave something where nothing is.
            return mean < 1e-9 ? 0 : mean;
        });
    }
    return found;
}

// Single messages, as objects.
const STATES = ["posted", "at", "matched", "moving", "landed", "done"];
function side(row) {
    if (!row) return null;
    const [call, fn, protocol, ...times] = row;
    const half = { call, function: data.functions[fn ?? 0], protocol: data.protocols[protocol ?? -1] };
    STATES.forEach((name, at) => { half[name] = times[at] ?? null; });
    return half;
}
const single = data.single.map((row, place) => ({
    place,
    number: row[0],
    from: row[1],
    to: row[2],
    bytes: row[3],
    tag: row[4],
    communicator: data.communicators[row[5]],
    begin: row[6],
    call: row[7],
    protocol: row[8] ?? 0,
    route: row[9],
    took: row[10],
    isByMpi: row[11] === 1,
    sender: row[12],
    receiver: row[13],
    predicted: row[14],
}));
const singleByNumber = new Map(single.map((message) => [message.number, message]));
const groupOf = (rank) => (rank === null ? UNKNOWN : Math.floor(rank / step));

function copiesOf(message) {
    return data.single_copies.filter((row) => row[0] === message.place).map((row) => ({
        link: data.links[row[1]],
        chunk: row[2],
        bytes: row[3],
        begin: row[4],
        took: row[5],
        uncertain: row[6],
        by: row[7],
        rank: row[8],
    }));
}

// Single messages that pass, those that took longest first.
function singlePass(filter) {
    const isRoute = (at) =>
        (filter.path === undefined || routePath[at] === filter.path) &&
        (filter.place === undefined || (data.routes[at].places ?? []).includes(filter.place));
    return single.filter((message) => {
        const bin = Math.min(Math.floor(message.begin / data.width_ns), data.bins - 1);
        const at = sizeClass(message.bytes);
        return (filter.call === undefined || message.call === filter.call) &&
            (filter.protocol === undefined || message.protocol === filter.protocol) &&
            (filter.rank === undefined || groupOf(message.from) === filter.rank || groupOf(message.to) === filter.rank) &&
            at >= filter.least && at <= filter.most && bin >= filter.first && bin <= filter.last && isRoute(message.route);
    }).sort((one, other) => (other.took ?? -1) - (one.took ?? -1) || one.number - other.number);
}
