// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Error codes of plugins. Those below 100 are from the CNI specification (SPEC.md, "Error"), except 8, which the usual CNI libraries return
// for an invalid network namespace. Those from 100 are Podlace's own.
const (
	CodeVersion       uint = 1  // incompatible cniVersion
	CodeUnsupported   uint = 2  // unsupported field in the configuration; the message has key and value
	CodeUnknown       uint = 3  // container unknown; the runtime need not call DEL
	CodeEnvironment   uint = 4  // invalid or missing CNI_* variable
	CodeIO            uint = 5  // a system call or file operation failed
	CodeDecode        uint = 6  // stdin is not the expected JSON
	CodeConfig        uint = 7  // the network configuration is invalid
	CodeNetns         uint = 8  // CNI_NETNS is not a usable network namespace
	CodeTryAgain      uint = 11 // temporary: try again later
	CodeNotAvailable  uint = 50 // STATUS: no ADD can be served
	CodeLimited       uint = 51 // STATUS: no ADD can be served, and existing containers are affected
	CodeStateDiffers  uint = 100
	CodeExhausted     uint = 101 // the address pool is exhausted
	CodeAddressTaken  uint = 102 // an address or an interface name is taken
	CodeDevice        uint = 103 // a device is gone or busy
	CodePortConflict  uint = 104 // a hostPort belongs to another pod
	CodeKernelFeature uint = 105 // the kernel lacks a feature
	CodeInternal      uint = 999 // a defect in the plugin
)

// Error is an error with a CNI error code for the runtime, and optionally a hint for the administrator and the key of a wrong value.
type Error struct {
	Code uint
	Hint string
	Key  string
	Err  error
}

// Error returns the text of the wrapped error.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an Error with a code and a formatted message, in which %w wraps an error as in fmt.Errorf.
func Errorf(code uint, format string, args ...any) error {
	return &Error{Code: code, Err: fmt.Errorf(format, args...)}
}

// Differs returns the error with which CHECK fails if the observed state is not that of ADD.
func Differs(format string, args ...any) error { return Errorf(CodeStateDiffers, format, args...) }

// IsDifferent reports whether err was made by Differs.
func IsDifferent(err error) bool { return Code(err) == CodeStateDiffers }

// WithHint adds what an administrator can do, which appears in the details of the error document. The code stays that of err.
func WithHint(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &Error{Code: Code(err), Hint: fmt.Sprintf(format, args...), Err: err}
}

// WithKey adds the configuration key that an error is about. Its text and code stay the same.
func WithKey(key string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Code: Code(err), Key: key, Err: err}
}

// KeyErrorf returns an error with CodeConfig about the value of a key.
func KeyErrorf(key, format string, args ...any) error {
	return &Error{Code: CodeConfig, Key: key, Err: fmt.Errorf(format, args...)}
}

// KeyOf returns the path of the key that an error is about, or "". The key of an inner error stands below that of the outer error.
func KeyOf(err error) string {
	var path []string
	for e := (*Error)(nil); errors.As(err, &e); err = e.Err {
		if e.Key != "" {
			path = append(path, e.Key)
		}
	}
	return strings.Join(path, ".")
}

// Code returns the CNI error code of the outermost Error that err wraps. Without one, the code follows from the methods MissingFeature and
// Busy of a wrapped error, or from the errno.
func Code(err error) uint {
	var e *Error
	var feature interface{ MissingFeature() string }
	var later interface{ Busy() bool }
	switch {
	case errors.As(err, &e):
		return e.Code
	case errors.As(err, &feature):
		return CodeKernelFeature
	case errors.As(err, &later) && later.Busy(), errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return CodeTryAgain
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EPROTONOSUPPORT):
		return CodeKernelFeature
	}
	return CodeIO
}

// Hint returns the hint that WithHint added to an error, or "".
func Hint(err error) string {
	var hints []string
	for e := (*Error)(nil); errors.As(err, &e); err = e.Err {
		if e.Hint != "" {
			hints = append(hints, e.Hint)
		}
	}
	return strings.Join(hints, "; ")
}

// Undo collects functions that undo the changes of a CNI operation after an error. Use it in a function with a named error result:
//
//	var undo plugin.Undo
//	defer undo.OnError(&err)
type Undo struct{ steps []func() error }

// Push adds the function that undoes a change. Call it directly after the change.
func (u *Undo) Push(step func() error) { u.steps = append(u.steps, step) }

// OnError calls the undo functions in reverse order if *err is not nil, and joins their errors to *err. After a panic, it calls them and
// panics again.
func (u *Undo) OnError(err *error) {
	v := recover()
	if v == nil && *err == nil {
		return
	}
	code := Code(*err)
	for _, step := range slices.Backward(u.steps) {
		if e := step(); e != nil {
			*err = &Error{Code: code, Err: errors.Join(*err, fmt.Errorf("undo: %w", e))}
		}
	}
	if v != nil {
		panic(v)
	}
}
