//! What the engine knows of a communicator or a datatype, hung on it as an attribute (MPI 4.1 section 7.7): the MPI library
//! copies and deletes it with what it hangs on, whoever does that and from wherever.

use super::{native, Abi, Comm, Datatype, Handle, Out};
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::Arc;

/// What may hang on an object of MPI's. The callbacks are made from inside calls of the MPI library.
pub trait Attribute: Send + Sync + 'static {
    /// What a duplicate of the object is to have, if anything.
    fn copied(&self) -> Option<Arc<Self>>;

    /// The object ends, or gets another value.
    fn ended(&self) {}
}

/// An object of MPI's that may have attributes.
pub trait Bearer: Handle {
    /// Makes a key for values of this type.
    ///
    /// # Safety
    /// Its values are only those that [`Keyval::attach`] sets.
    unsafe fn create<T: Attribute>(number: Out<'_, c_int>) -> c_int;

    /// # Safety
    /// `value` is one for that key.
    unsafe fn set(self, key: c_int, value: *mut c_void) -> c_int;

    /// The value, if there is one.
    fn get(self, key: c_int) -> (c_int, Option<*mut c_void>);
}

macro_rules! bearers {
    ($($handle:ident $create:ident $set:ident $get:ident;)*) => {$(
        impl Bearer for $handle {
            unsafe fn create<T: Attribute>(number: Out<'_, c_int>) -> c_int {
                let (copy, delete) = (on_copy::<$handle, T> as *mut c_void, on_delete::<$handle, T> as *mut c_void);
                // SAFETY: the callbacks have the C signatures of MPI 4.1 section 7.7 and live as long as the library.
                unsafe { native::$create(copy, delete, number, null_mut()) }
            }

            unsafe fn set(self, key: c_int, value: *mut c_void) -> c_int {
                // SAFETY: any pointer is a value; what the callbacks make of it is the caller's promise.
                unsafe { native::$set(self, key, value) }
            }

            fn get(self, key: c_int) -> (c_int, Option<*mut c_void>) {
                let (mut value, mut found) = (null_mut::<c_void>(), 0);
                // SAFETY: the value, a pointer, is written to a local.
                let code = unsafe { native::$get(self, key, (&raw mut value).cast(), Out::of(&mut found)) };
                (code, (found != 0 && !value.is_null()).then_some(value))
            }
        }
    )*};
}

bearers! {
    Comm comm_create_keyval comm_set_attr comm_get_attr;
    Datatype type_create_keyval type_set_attr type_get_attr;
}

/// The key of an attribute. Each value owns one reference, which the delete callback gives back.
#[derive(Debug)]
pub struct Keyval<H, T> {
    number: c_int,
    of: PhantomData<fn(H) -> T>,
}

impl<H: Bearer, T: Attribute> Keyval<H, T> {
    /// A new key.
    pub fn new(abi: &Abi) -> Option<Keyval<H, T>> {
        let mut number = -1;
        // SAFETY: nobody else learns the number.
        let code = unsafe { H::create::<T>(Out::of(&mut number)) };
        let of = PhantomData;
        (code == abi.success).then_some(Keyval { number, of })
    }

    /// Hangs a value on an object. Says whether that was done.
    pub fn attach(&self, abi: &Abi, to: H, value: Arc<T>) -> bool {
        let raw = Arc::into_raw(value);
        // SAFETY: the reference is the attribute's from now on.
        let code = unsafe { to.set(self.number, raw.cast_mut().cast()) };
        if code != abi.success {
            // SAFETY: the library did not take the reference.
            drop(unsafe { Arc::from_raw(raw) });
        }
        code == abi.success
    }

    /// The value that hangs on an object.
    pub fn of(&self, abi: &Abi, object: H) -> Option<Arc<T>> {
        let (code, value) = object.get(self.number);
        let raw = value.filter(|_| code == abi.success)?.cast::<T>();
        // SAFETY: made by `Arc::into_raw`, and counted until `on_delete`, which comes at the end of the object: the program
        // may not free it while it gives it to another call.
        unsafe {
            Arc::increment_strong_count(raw);
            Some(Arc::from_raw(raw))
        }
    }
}

extern "C" fn on_copy<H, T: Attribute>(
    _object: H,
    _key: c_int,
    _extra: *mut c_void,
    value: *mut c_void,
    place: Out<'_, *const T>,
    flag: Out<'_, c_int>,
) -> c_int {
    // SAFETY: a value of ours, which lives while the object does that is being duplicated.
    let value = unsafe { &*value.cast_const().cast::<T>() };
    let copied = catch_unwind(AssertUnwindSafe(|| value.copied()));
    let copied = copied.ok().flatten();
    flag.write(c_int::from(copied.is_some()));
    if let Some(copied) = copied {
        place.write(Arc::into_raw(copied));
    }
    0
}

extern "C" fn on_delete<H, T: Attribute>(
    _object: H,
    _key: c_int,
    value: *mut c_void,
    _extra: *mut c_void,
) -> c_int {
    if !value.is_null() {
        // SAFETY: gives back the reference that the attribute held.
        let value = unsafe { Arc::from_raw(value.cast_const().cast::<T>()) };
        let _ = catch_unwind(AssertUnwindSafe(|| value.ended()));
    }
    0
}
