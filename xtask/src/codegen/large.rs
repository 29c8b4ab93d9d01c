//! Large-count functions made of the plain ones, for MPI libraries that lack them, and persistent collectives made of
//! non-blocking ones.

use super::table::{Class, Function, Section};
use super::write::{parameters, NOTICE};

/// The plain form of an exported large-count function.
pub fn plain_of<'a>(sections: &'a [Section], large: &Function) -> Option<&'a Function> {
    let name = large.name.strip_suffix("_c")?;
    let has = |section: &&Section| section.functions.iter().any(|f| f.name == large.name);
    let section = sections.iter().find(has)?;
    // A request that lasts keeps what is given to it: see `persistent`.
    if name.ends_with("_init") && section.class == Class::TakenComposed {
        return None;
    }
    let is_exported = !matches!(section.class, Class::Native | Class::Checked);
    let mut own = section.functions.iter();
    own.find(|function| function.name == name && is_exported)
}

/// `src/mpi/large/generated.rs`.
pub fn functions(sections: &[Section]) -> Result<String, String> {
    let mut out = format!(
        "// {NOTICE}\n\n\
         use super::{{At, Narrow}};\n\
         use crate::mpi::{{calls, handles::*, native, Function}};\n\
         use std::ffi::{{c_int, c_void}};\n\ncalls! {{"
    );
    for large in sections.iter().flat_map(|section| &section.functions) {
        let Some(plain) = plain_of(sections, large) else {
            continue;
        };
        let mut body = Body::new(large);
        let call = if makes_parts(plain) {
            let arguments: Vec<&str> = names(plain);
            format!(
                "narrow.in_parts(sendbuf, recvbuf, count, datatype, |sendbuf, recvbuf, count| native::{}({}))",
                plain.snake(),
                arguments.join(", ")
            )
        } else {
            let arguments = body.narrow(large, plain)?;
            let call = format!("native::{}({})", plain.snake(), arguments.join(", "));
            match large.parameters.iter().find(|(_, kind)| kind.0 == "*count") {
                Some((name, _)) => format!("narrow.writing({name}, |result| {call})"),
                None => format!("narrow.call(|| {call})"),
            }
        };
        out += &function(
            large,
            &format!("`{}` by `{}`.", large.name, plain.name),
            &body.with(&call),
        )?;
    }
    Ok(out + "}\n")
}

/// `src/entry/persistent_collectives.rs`: each start is a non-blocking collective.
pub fn persistent(sections: &[Section]) -> Result<String, String> {
    let mut out = format!(
        "// {NOTICE}\n\n\
         use super::collective::{{Persistent, Pointers}};\n\
         use crate::engine::NativeScope;\n\
         use crate::mpi::large::{{At, Narrow}};\n\
         use crate::mpi::{{calls, handles::*, native, Function}};\n\
         use std::ffi::{{c_int, c_void}};\n\ncalls! {{"
    );
    let has = |section: &&Section| {
        section
            .functions
            .iter()
            .any(|f| f.name == "MPI_Barrier_init")
    };
    let section = sections
        .iter()
        .find(has)
        .ok_or("no persistent collectives")?;
    let all = || sections.iter().flat_map(|section| &section.functions);
    for initialization in &section.functions {
        let base = initialization.name.trim_end_matches("_c");
        let plain = section
            .functions
            .iter()
            .find(|f| f.name == base)
            .ok_or("no plain form")?;
        let stem = base
            .trim_start_matches("MPI_")
            .trim_end_matches("_init")
            .to_lowercase();
        let started = all().find(|f| f.name == format!("MPI_I{stem}"));
        let started = started.ok_or_else(|| format!("there is no MPI_I{stem}"))?;
        let mut body = Body::new(initialization);
        body.lines.insert(0, format!(
            "if Persistent::is_native(Function::{}) {{ let _scope = NativeScope::enter(); return native::{}({}); }}",
            initialization.variant(),
            initialization.snake(),
            names(initialization).join(", ")
        ));
        body.narrow(initialization, plain)?;
        let (mut duplicates, mut lent) = (String::new(), Vec::new());
        for (name, kind) in &initialization.parameters {
            match kind.0.as_str() {
                "datatype" => duplicates += &format!("let {name} = persistent.datatype({name})?;"),
                "[const datatype]" => {
                    let length = Side::of(initialization, name).length;
                    body.lines.push(format!("let {name}_length = {length};"));
                    duplicates +=
                        &format!("let {name} = persistent.datatypes({name}, {name}_length)?;");
                    lent.push(name.as_str());
                }
                "buf" | "cbuf" => lent.push(name),
                array if array.starts_with('[') => lent.push(name),
                _ => {}
            }
        }
        // Arguments of the one function that are none of the other's: info. The request is the start's own.
        let arguments: Vec<&str> = names(started);
        let lent = match lent.as_slice() {
            [one] => format!("({one},)"),
            all => format!("({})", all.join(", ")),
        };
        let call = format!(
            "let kept = match narrow.finish() {{ Ok(kept) => kept, Err(code) => return code }};\n\
             Persistent::make(comm, request, kept, |persistent| {{ {duplicates} let lent = Pointers({lent}); \
             Ok(Box::new(move |request| {{ let {lent} = lent.get(); native::{}({}) }})) }})",
            started.snake(),
            arguments.join(", ")
        );
        out += &function(
            initialization,
            &format!("`{}` (MPI 4.1 section 6.13).", initialization.name),
            &body.with(&call),
        )?;
    }
    Ok(out + "}\n")
}

fn names(function: &Function) -> Vec<&str> {
    let all = function.parameters.iter();
    all.map(|(name, _)| name.as_str()).collect()
}

/// A function as the macro at the head of the file takes it.
fn function(function: &Function, what: &str, body: &str) -> Result<String, String> {
    Ok(format!(
        "\n    /// {what}\n    {}({}) {{\n{body}    }}\n",
        function.snake(),
        parameters(function)?
    ))
}

/// Reductions item by item, which can be made a part after the other.
fn makes_parts(plain: &Function) -> bool {
    ["MPI_Reduce", "MPI_Allreduce", "MPI_Scan", "MPI_Exscan"].contains(&plain.name.as_str())
}

/// Statements that bring arguments into the form of the plain function.
struct Body {
    lines: Vec<String>,
}

impl Body {
    fn new(function: &Function) -> Body {
        Body {
            lines: vec![format!(
                "let mut narrow = Narrow::new(Function::{}, {});",
                function.variant(),
                place(function)
            )],
        }
    }

    /// Shadows each argument that differs, and gives the arguments of the plain function.
    fn narrow(&mut self, large: &Function, plain: &Function) -> Result<Vec<String>, String> {
        let has = |kind: &str| large.parameters.iter().any(|(_, found)| found.0 == kind);
        let mut arguments = Vec::new();
        let pairs = large.parameters.iter().zip(&plain.parameters);
        for (i, ((name, wide), (_, narrow))) in pairs.enumerate() {
            if wide.0 == "*count" && narrow.0 == "*int" {
                arguments.push("result".to_owned());
                continue;
            }
            arguments.push(name.clone());
            if wide.rust()? == narrow.rust()? {
                continue;
            }
            let Side {
                significant,
                length,
            } = Side::of(large, name);
            self.lines.push(match wide.0.as_str() {
                // A collective operation works on items of its type. Those on windows take types that are made of them.
                "count" if has("op") && !has("win") => {
                    format!("let {name} = narrow.count({name:?}, {name});")
                }
                "count" => {
                    let mut behind = large.parameters[i..].iter();
                    let (datatype, _) = behind
                        .find(|(_, kind)| kind.0 == "datatype")
                        .ok_or_else(|| format!("{}: {name} counts nothing", large.name))?;
                    format!("let ({name}, {datatype}) = narrow.items({name:?}, {name}, {datatype}, {significant});")
                }
                "aint" => format!("let {name} = narrow.unit({name:?}, {name});"),
                "[const count]" | "[const aint]" => {
                    format!("let {name} = narrow.array({name:?}, {name}, {length});")
                }
                other => return Err(format!("{}: {name} is a {other}", large.name)),
            });
        }
        Ok(arguments)
    }

    fn with(&self, call: &str) -> String {
        let lines = self.lines.iter().map(String::as_str);
        let all = lines.chain(call.lines()).filter(|line| !line.is_empty());
        all.map(|line| format!("        {line}\n")).collect()
    }
}

/// When an argument counts, and how many entries it has if it is an array.
struct Side {
    significant: String,
    length: String,
}

impl Side {
    fn of(function: &Function, name: &str) -> Side {
        let base = function
            .name
            .trim_end_matches("_c")
            .trim_end_matches("_init");
        let sends = ["send", "sdispls"]
            .iter()
            .any(|start| name.starts_with(start));
        let is_collective =
            names(function).contains(&"recvbuf") && !names(function).contains(&"dest");
        let is_of_root = (base.contains("_Gather") && !sends)
            || (base.contains("_Scatter") && (sends || name == "displs"));
        let (significant, length) = if base.contains("Neighbor") {
            let degree = if sends { "out_degree" } else { "in_degree" };
            ("true", format!("narrow.{degree}()"))
        } else if base.contains("Reduce_scatter") {
            ("true", "narrow.members()".to_owned())
        } else if is_of_root {
            (
                "narrow.is_root(root)",
                "narrow.others_if(narrow.is_root(root))".to_owned(),
            )
        } else if sends && is_collective {
            (
                "!narrow.is_in_place(sendbuf)",
                "narrow.others_if(!narrow.is_in_place(sendbuf))".to_owned(),
            )
        } else {
            ("true", "narrow.others_if(true)".to_owned())
        };
        Side {
            significant: significant.to_owned(),
            length,
        }
    }
}

/// Where an error is raised.
fn place(function: &Function) -> &'static str {
    let has = |kind: &str| function.parameters.iter().any(|(_, found)| found.0 == kind);
    match (has("comm"), has("win"), has("file")) {
        (true, ..) => "At::Comm(comm)",
        (_, true, _) => "At::Window(win)",
        (.., true) => "At::File(fh)",
        _ => "At::World",
    }
}
