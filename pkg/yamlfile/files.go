// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/store"
)

// maxStdin is the maximum size of standard input in bytes. The descriptions of all pods in a large cluster fit into this size.
const maxStdin = 256 << 20

// readAtMost reads at most the given number of bytes. For a longer text, readAtMost returns an error, because checking only the beginning
// could miss errors in the rest.
func readAtMost(from io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(from, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("standard input is longer than %d bytes: check the objects of each namespace by themselves", most)
	}
	return data, err
}

// A File is a file that was read.
type File struct {
	Name string
	Data []byte
}

// Files reads one file, all files in a folder, or standard input. With an error it returns the files that it could read.
func Files(stdin io.Reader, name string) (files []File, err error) {
	if name == "-" {
		data, err := readAtMost(stdin, maxStdin)
		if err != nil {
			return nil, err
		}
		return []File{{Name: "stdin", Data: data}}, nil
	}
	names := []string{name}
	if info, statErr := os.Stat(name); statErr == nil && info.IsDir() {
		names = nil
		extensions := []string{".conflist", ".conf", ".json", ".yaml", ".yml"} // that container runtimes or kubectl would read
		var entries []os.DirEntry
		entries, err = os.ReadDir(name)
		for _, e := range entries {
			if slices.Contains(extensions, filepath.Ext(e.Name())) && !e.IsDir() {
				names = append(names, filepath.Join(name, e.Name()))
			}
		}
		if len(names) == 0 && err == nil {
			err = fmt.Errorf("%s: the folder has no file that ends in %s", name, strings.Join(extensions, ", "))
		}
	}
	for _, name := range names {
		data, unread := store.ReadFile(name)
		if err = errors.Join(err, unread); unread == nil {
			files = append(files, File{Name: name, Data: data})
		}
	}
	return files, err
}
