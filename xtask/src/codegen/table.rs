//! The table of MPI functions, `src/mpi/functions.txt`: its grammar is explained at its head.

use std::fmt;

/// What the preload library does with a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The engine decides, also before the library is armed.
    TakenArming,
    /// The engine decides.
    Taken,
    /// The engine decides, unless the library stands aside.
    TakenMessages,
    /// As messages; where the library lacks it, the engine makes it of other functions.
    TakenComposed,
    /// Native, while the helper serves.
    Watched,
    /// Native, after a look at its buffers; large-count forms are not exported.
    Checked,
    /// Not exported.
    Native,
}

impl Class {
    fn parse(text: &str) -> Option<Class> {
        Some(match text {
            "taken arming" => Class::TakenArming,
            "taken" => Class::Taken,
            "taken messages" => Class::TakenMessages,
            "taken composed" => Class::TakenComposed,
            "watched" => Class::Watched,
            "checked" => Class::Checked,
            "native" => Class::Native,
            _ => return None,
        })
    }

    /// The class as the engine names it.
    pub fn broad(self) -> &'static str {
        match self {
            Class::TakenArming | Class::Taken | Class::TakenMessages | Class::TakenComposed => {
                "Taken"
            }
            Class::Watched => "Watched",
            Class::Checked => "Checked",
            Class::Native => "Native",
        }
    }
}

/// A parameter or result type of the table's grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type(pub String);

impl Type {
    /// The Rust type that has the same C ABI on every MPI.
    pub fn rust(&self) -> Result<&'static str, String> {
        Ok(match self.0.as_str() {
            "int" | "fint" => "c_int",
            "count" | "offset" => "i64",
            "aint" => "isize",
            "double" => "f64",
            "buf" | "strings" | "tool" => "*mut c_void",
            "cbuf" | "fn" => "*const c_void",
            "cstr" => "*const c_char",
            "str" => "*mut c_char",
            other => match handle(other) {
                Some(handle) => handle,
                None => return pointer(other).ok_or_else(|| format!("unknown type {other:?}")),
            },
        })
    }

    /// Whether it is no bare pointer: then its Rust type says that it is what the function takes.
    fn is_typed(&self) -> bool {
        self.rust().is_ok_and(|rust| !rust.starts_with('*'))
    }
}

/// The Rust types of handles.
const HANDLES: [(&str, &str, &str); 11] = [
    ("comm", "Comm", "Slot<'_, Comm>"),
    ("datatype", "Datatype", "Slot<'_, Datatype>"),
    ("request", "Request", "Slot<'_, Request>"),
    ("message", "Message", "Slot<'_, Message>"),
    ("group", "Group", "Slot<'_, Group>"),
    ("info", "Info", "Slot<'_, Info>"),
    ("errhandler", "Errhandler", "Slot<'_, Errhandler>"),
    ("op", "Op", "Slot<'_, Op>"),
    ("win", "Win", "Slot<'_, Win>"),
    ("file", "File", "Slot<'_, File>"),
    ("session", "Session", "Slot<'_, Session>"),
];

fn handle(name: &str) -> Option<&'static str> {
    let mut handles = HANDLES.iter();
    handles.find_map(|(known, rust, _)| (*known == name).then_some(*rust))
}

/// `*T`, `*const T`, `*inout status`, `[T]`, `[const T]`. Arrays of handles are untyped: their layout is the ABI's.
fn pointer(text: &str) -> Option<&'static str> {
    if let Some(inner) = text.strip_prefix('*') {
        return Some(match inner {
            "int" | "fint" => "Out<'_, c_int>",
            "count" | "offset" => "Out<'_, i64>",
            "aint" => "Out<'_, isize>",
            "tool" => "*mut *mut c_void",
            "status" => "StatusOut<'_>",
            "inout status" => "StatusAt<'_>",
            "const status" => "StatusRef<'_>",
            "f08_status" => "*mut c_void",
            "const f08_status" => "*const c_void",
            "const int" | "const fint" => "*const c_int",
            name => {
                let mut handles = HANDLES.iter();
                let slot = handles.find(|(known, ..)| *known == name);
                return slot.map(|(.., slot)| *slot);
            }
        });
    }
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    let (inner, constant) = match inner.strip_prefix("const ") {
        Some(inner) => (inner, true),
        None => (inner, false),
    };
    Some(match (inner, constant) {
        ("int" | "fint", false) => "*mut c_int",
        ("int" | "fint", true) => "*const c_int",
        ("count" | "offset", false) => "*mut i64",
        ("count" | "offset", true) => "*const i64",
        ("aint", false) => "*mut isize",
        ("aint", true) => "*const isize",
        ("status", false) => "*mut c_void",
        (name, false) if handle(name).is_some() => "*mut c_void",
        (name, true) if handle(name).is_some() => "*const c_void",
        _ => return None,
    })
}

/// A C function of MPI.
#[derive(Clone, Debug)]
pub struct Function {
    /// `MPI_Send`
    pub name: String,
    pub parameters: Vec<(String, Type)>,
    pub result: Type,
    pub variadic: bool,
    /// Written by hand of other functions, for libraries that lack it.
    pub composed: bool,
}

impl Function {
    /// Names of the parameters that are buffers with data.
    pub fn buffers(&self) -> impl Iterator<Item = &str> {
        let is_buffer = |(name, kind): &&(String, Type)| {
            matches!(kind.0.as_str(), "buf" | "cbuf") && name != "baseptr" && name != "buffer_addr"
        };
        self.parameters
            .iter()
            .filter(is_buffer)
            .map(|(name, _)| name.as_str())
    }

    /// Whether its Rust types say all that it asks of its caller: it takes no bare pointer and no request that may have
    /// ended, makes no handle of a number, and lets nobody touch memory that was lent before.
    pub fn is_safe(&self) -> bool {
        let is_of_handle = |name: &str| name.ends_with("_f2c") || name.ends_with("_fromint");
        let asks = |(_, kind): &(String, Type)| {
            let is_handle = matches!(kind.0.as_str(), "request" | "win" | "file");
            !kind.is_typed() || is_handle
        };
        let only_raises = self.name.ends_with("_call_errhandler");
        !self.name.ends_with("inalize")
            && !is_of_handle(&self.name)
            && (only_raises || !self.parameters.iter().any(asks))
    }

    /// `send`, `type_create_struct_c`, `mpix_query_cuda_support`.
    pub fn snake(&self) -> String {
        self.name
            .strip_prefix("MPI_")
            .unwrap_or(&self.name)
            .to_lowercase()
    }

    /// `Send`, `TypeCreateStructC`, `MpixQueryCudaSupport`.
    pub fn variant(&self) -> String {
        self.snake().split('_').map(capitalized).collect()
    }
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    letters
        .next()
        .map(|first| first.to_ascii_uppercase().to_string() + letters.as_str())
        .unwrap_or_default()
}

/// Functions that share a class and a reason.
#[derive(Debug)]
pub struct Section {
    pub title: String,
    pub class: Class,
    pub why: String,
    pub functions: Vec<Function>,
}

impl Section {
    /// The class of one of its functions. A library may lack large-count forms: of those that would only be checked,
    /// none is made, so none is exported.
    pub fn class_of(&self, function: &Function) -> Class {
        if self.class == Class::Checked && function.name.ends_with("_c") {
            Class::Native
        } else {
            self.class
        }
    }
}

/// A line that does not follow the grammar.
#[derive(Debug)]
pub struct TableError {
    line: usize,
    what: String,
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "functions.txt:{}: {}", self.line, self.what)
    }
}

/// Parses the whole table.
pub fn parse(text: &str) -> Result<Vec<Section>, TableError> {
    let mut sections: Vec<Section> = Vec::new();
    let mut title = "";
    for (number, line) in text.lines().enumerate() {
        let fail = |what: &str| TableError {
            line: number + 1,
            what: format!("{what}: {line}"),
        };
        if let Some(comment) = line.strip_prefix('#') {
            title = comment.trim();
        } else if let Some(class) = line.strip_prefix("class: ") {
            let class = Class::parse(class).ok_or_else(|| fail("unknown class"))?;
            sections.push(Section {
                title: title.to_owned(),
                class,
                why: String::new(),
                functions: Vec::new(),
            });
        } else if !line.trim().is_empty() {
            let section = sections
                .last_mut()
                .ok_or_else(|| fail("outside a section"))?;
            if let Some(why) = line.strip_prefix("why: ") {
                section.why = why.to_owned();
            } else {
                section
                    .functions
                    .extend(functions(line).ok_or_else(|| fail("not a function"))?);
            }
        }
    }
    Ok(sections)
}

/// The function of a line, and its large-count form where the line has alternatives `A|B`.
fn functions(line: &str) -> Option<Vec<Function>> {
    let (line, composed) = match line.strip_suffix(" := composed") {
        Some(line) => (line, true),
        None => (line, false),
    };
    let (name, rest) = line.split_once('(')?;
    let (parameters, result) = rest.rsplit_once(')')?;
    let result = match result.trim().strip_prefix("->") {
        Some(result) => result.trim(),
        None if result.trim().is_empty() => "int",
        None => return None,
    };
    let mut plain = Function {
        name: name.to_owned(),
        parameters: Vec::new(),
        result: Type(result.to_owned()),
        variadic: false,
        composed,
    };
    let mut large = Function {
        name: format!("{name}_c"),
        ..plain.clone()
    };
    let mut has_large = false;
    for parameter in parameters
        .split(", ")
        .filter(|parameter| !parameter.is_empty())
    {
        if parameter == "..." {
            plain.variadic = true;
            continue;
        }
        let (name, kind) = parameter.split_once(": ")?;
        let (a, b) = kind.split_once('|').unwrap_or((kind, kind));
        has_large |= kind.contains('|');
        plain.parameters.push((name.to_owned(), Type(a.to_owned())));
        large.parameters.push((name.to_owned(), Type(b.to_owned())));
    }
    Some(if has_large {
        vec![plain, large]
    } else {
        vec![plain]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_make_the_large_count_form() {
        let sections = parse("# Sends\nclass: taken\nwhy: because\nMPI_Send(buf: cbuf, count: int|count, comm: comm)\n");
        let Ok(sections) = sections else {
            panic!("the line is right")
        };
        let [plain, large] = sections[0].functions.as_slice() else {
            panic!("two functions")
        };
        assert_eq!(
            (plain.name.as_str(), plain.parameters[1].1.rust()),
            ("MPI_Send", Ok("c_int"))
        );
        assert_eq!(
            (large.name.as_str(), large.parameters[1].1.rust()),
            ("MPI_Send_c", Ok("i64"))
        );
        assert_eq!(large.variant(), "SendC");
    }

    #[test]
    fn mistakes_name_their_line() {
        for (text, line) in [
            ("class: other", ":1:"),
            ("class: taken\nMPI_Send", ":2:"),
            ("MPI_Send()", ":1:"),
        ] {
            let Err(error) = parse(text) else {
                panic!("{text:?} is wrong")
            };
            assert!(error.to_string().contains(line), "{error}");
        }
        assert!(Type("[unheard of]".to_owned()).rust().is_err());
    }
}
