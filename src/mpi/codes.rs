//! Error codes of the library's own, whose text says which message an error handler is called about, and why.
//!
//! A code is made when the first error with its text is raised, by a thread of the program's: the calls are local, and
//! call nothing back. MPICH 4.0 has no text for codes of the classes that it defines itself (`MPI_Error_string` finds
//! another's): there they are of a class that was made for them, and `MPI_Error_class`, which is intercepted for that, says
//! the class that was meant.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, CString};

use parking_lot::Mutex;

use super::{native, Abi, Out};

/// Codes that are made, at most.
const CODES_MAX: usize = 64;

/// What is raised when there are as many, with a code of its own.
const GENERAL: &str = "a message between buffers of this node is lost; stderr says which";

/// Longest text, bytes: `MPI_MAX_ERROR_STRING` is 256 in Open MPI, and more elsewhere.
const TEXT_MAX: usize = 255;

/// Room for any text of an MPI library's.
const ANY_TEXT: usize = 4096;

static CODES: Mutex<Option<Codes>> = Mutex::new(None);

/// The codes that there are, by their texts.
type Codes = HashMap<Box<str>, c_int>;

/// Classes that were made, each with the one of MPI's that it stands for.
static OWN_CLASSES: Mutex<Vec<(c_int, c_int)>> = Mutex::new(Vec::new());

/// The code of this class for an error with this text, or the class itself where the MPI library makes none.
pub fn code_of(abi: &Abi, class: c_int, text: &str) -> c_int {
    let mut codes = CODES.lock();
    let codes = codes.get_or_insert_with(HashMap::new);
    let text = text_with(codes, text);
    *codes
        .entry(text.into())
        .or_insert_with(|| make(abi, class, text).unwrap_or(class))
}

/// The text with a code that stands for this one.
fn text_with<'a>(codes: &Codes, text: &'a str) -> &'a str {
    if codes.contains_key(text) || codes.len() < CODES_MAX {
        text
    } else {
        GENERAL
    }
}

/// The class that a program is to see.
pub fn class_seen(class: c_int) -> c_int {
    let own = OWN_CLASSES.lock();
    let meant = own.iter().find(|(made, _)| *made == class);
    meant.map_or(class, |(_, meant)| *meant)
}

fn make(abi: &Abi, class: c_int, text: &str) -> Option<c_int> {
    let text = written(text);
    let known = OWN_CLASSES
        .lock()
        .iter()
        .find(|(_, meant)| *meant == class)
        .copied();
    if let Some((own, _)) = known {
        return add(abi, own, &text);
    }
    match add(abi, class, &text) {
        Some(code) if has_text(abi, code, &text) => Some(code),
        _ => add(abi, own_class(abi, class)?, &text),
    }
}

/// A text as the MPI library takes it.
fn written(text: &str) -> CString {
    let mut text = format!("anabranch: {text}").replace('\0', "");
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    CString::new(text).unwrap_or_default()
}

fn own_class(abi: &Abi, meant: c_int) -> Option<c_int> {
    let mut class = 0;
    let made = native::add_error_class(Out::of(&mut class));
    (made == abi.success).then(|| {
        OWN_CLASSES.lock().push((class, meant));
        class
    })
}

fn add(abi: &Abi, class: c_int, text: &CString) -> Option<c_int> {
    let mut code = 0;
    if native::add_error_code(class, Out::of(&mut code)) != abi.success {
        return None;
    }
    // SAFETY: a string that outlives the call.
    let told = unsafe { native::add_error_string(code, text.as_ptr()) };
    (told == abi.success).then_some(code)
}

/// Whether the library finds the text of a code.
fn has_text(abi: &Abi, code: c_int, text: &CString) -> bool {
    let mut found = [0u8; ANY_TEXT];
    let mut length = 0;
    // SAFETY: there is room for what any library has as its longest text.
    let said = unsafe {
        native::error_string(
            code,
            found.as_mut_ptr().cast::<c_char>(),
            Out::of(&mut length),
        )
    };
    said == abi.success && found.starts_with(text.as_bytes_with_nul())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_limited() {
        let mut codes = Codes::new();
        for number in 0..200 {
            let text = format!("message {number}");
            codes.insert(text_with(&codes, &text).into(), number);
        }
        assert_eq!(codes.len(), CODES_MAX + 1);
        assert_eq!(text_with(&codes, "message 7"), "message 7");
        assert_eq!(text_with(&codes, "message 70"), GENERAL);
    }

    #[test]
    fn a_text_is_cut_to_what_every_library_takes() {
        let text = written(&"ä\0".repeat(300));
        assert_eq!(text.as_bytes().len(), 255);
        assert!(text
            .to_str()
            .is_ok_and(|text| text.starts_with("anabranch: ää")));
    }
}
